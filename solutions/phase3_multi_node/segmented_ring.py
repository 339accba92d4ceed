"""Ring all-reduce in segments: one travels while another is being added.

A ring adds a chunk only when all of it has come, and no byte travels in that time. So divide the
chunks further into segments: one travels while another is being added. That hides the additions,
and the link's latency is paid only once. For N bytes over W ranks, β seconds per byte, and α
seconds of latency per message:

    2(W-1) messages of N/W bytes      2(W-1)·(α + N/W·β) + the additions
    2(W-1)·S messages of N/(W·S)      2(W-1)/W·N·β + α, as long as a segment takes longer than α

per rank, with S segments per chunk. The bytes are the same. The CPU's work for a message is not
hidden: S times as many messages cost S times as much of it.
Invariant: a hop sends the segment that came S hops before it, so no more than S hops are on their
way at once.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (the ring).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

from .ring_allreduce import (
    COMBINE,
    Op,
    all_gather_steps,
    check_arguments,
    exchange,
    flattened,
    reduce_scatter_steps,
    wait,
)

SEGMENT_BYTES = 2**23  # shorter ones cost more in waking up than they hide (gloo, 2 cores)
WINDOW = 2  # segments on their way: one travels while the other is being combined


class Hop(NamedTuple):
    """One segment to send to the right, and where the one that comes from the left belongs."""

    outgoing: Tensor
    target: Tensor
    combines: bool  # what comes is combined with the target, else it replaces it
    completes: bool  # combines the last part that the target lacks


def ring_hops(rank: int, segments: Sequence[Sequence[Tensor]]) -> Iterator[Hop]:
    """All hops of an all-reduce in the order in which a rank starts them.

    ``segments[c][k]`` is segment k of chunk c. W chunks with S segments each give 2(W-1)·S hops. A
    hop sends the target of the hop S hops before it, if there is one.
    """
    # --- exercise 3.4: start
    # Step 1: one step of the ring after the other, and within a step one segment after the other
    world_size = len(segments)
    for combines, steps in ((True, reduce_scatter_steps), (False, all_gather_steps)):
        for send, receive in steps(rank, world_size):
            for outgoing, target in zip(segments[send], segments[receive], strict=True):
                yield Hop(outgoing, target, combines, combines and receive == rank)
    # --- exercise 3.4: end


def segmented_ring_all_reduce(
    tensor: Tensor, op: Op = "sum", group: Group = None, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """``ring_all_reduce`` in messages of at most ``segment_bytes``, which hide the additions.

    Tensors, neighbours, result and bytes per rank are as there. With S segments per chunk a rank
    sends at most 2(W-1)·S messages. A segment has at least one element. While a segment is combined
    the next is on its way, so that α is paid once. The time is 2(W-1)/W·N·β + α, if a segment takes
    at least α. Extra memory: a few segments (here WINDOW, at most five), and none afterwards. For a
    tensor that is not contiguous there is a copy, too. Raises ValueError as ``check_arguments``
    does, and if ``segment_bytes`` < 1, before anything is sent.
    """
    # --- exercise 3.4: start
    # Step 2: divide every chunk into the same number of segments, alike on all ranks
    # Step 3: keep WINDOW hops on their way, each with a buffer of its own. Finish the oldest hop
    #         (wait, combine, divide for the mean) before you start another
    # Step 4: never keep more than S hops on their way: a hop sends what the S-th hop before it
    #         brings
    rank, world_size = check_arguments(tensor, op, group)
    if segment_bytes < 1:
        raise ValueError(f"segment_bytes must be at least 1, got {segment_bytes}")
    left, right = (rank - 1) % world_size, (rank + 1) % world_size

    def finish(hop: Hop, incoming: Tensor, handles: list[dist.Work]) -> None:
        wait(handles[:1])
        if hop.combines:
            COMBINE[op](hop.target, incoming)
        if hop.completes and op == "mean":
            hop.target.div_(world_size)
        wait(handles[1:])

    with flattened(tensor) as flat:
        chunks = flat.tensor_split(world_size)
        longest = max(1, segment_bytes // flat.element_size())
        count = max(1, math.ceil(chunks[0].numel() / longest))
        segments = [chunk.tensor_split(count) for chunk in chunks]
        window = min(WINDOW, count)
        buffers = [torch.empty_like(segments[0][0]) for _ in range(window)]
        started: deque[tuple[Hop, Tensor, list[dist.Work]]] = deque()
        for number, hop in enumerate(ring_hops(rank, segments)):
            if len(started) == window:
                finish(*started.popleft())
            buffer = buffers[number % window][: hop.target.numel()]
            incoming = buffer if hop.combines else hop.target
            started.append((hop, incoming, exchange(hop.outgoing, right, incoming, left, group)))
        for each in started:
            finish(*each)
    # --- exercise 3.4: end
