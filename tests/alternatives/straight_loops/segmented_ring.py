# for: 3.4
"""Written from the docstrings alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from given.agreement import Group

from .ring_allreduce import (
    COMBINE,
    Op,
    check_arguments,
    exchange,
    flattened,
    wait,
)

SEGMENT_BYTES = 2**23
WINDOW = 2


class Hop(NamedTuple):
    outgoing: Tensor
    target: Tensor
    combines: bool
    completes: bool


def ring_hops(rank: int, segments: Sequence[Sequence[Tensor]]) -> Iterator[Hop]:
    size, count = (len(segments), len(segments[0]))
    for number in range(2 * (size - 1) * count):
        step, k = divmod(number, count)
        give, get = ((rank - step - 1) % size, (rank - step - 2) % size)
        yield Hop(segments[give][k], segments[get][k], step < size - 1, step == size - 2)


def segmented_ring_all_reduce(
    tensor: Tensor, op: Op = "sum", group: Group = None, *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    rank, size = check_arguments(tensor, op, group)
    if segment_bytes < 1:
        raise ValueError("a segment has at least one byte")
    with flattened(tensor) as flat:
        length = max(segment_bytes // tensor.element_size(), 1)
        longest = -(-flat.numel() // size)
        count = max(1, -(-longest // length))
        segments = [chunk.tensor_split(count) for chunk in flat.tensor_split(size)]
        under_way: deque = deque()

        def finish() -> None:
            hop, came, handles = under_way.popleft()
            if came.numel():
                handles.pop(0).wait()
            if hop.combines:
                COMBINE[op](hop.target, came)
            if hop.completes and (op == "mean"):
                hop.target.div_(size)
            wait(handles)

        for hop in ring_hops(rank, segments) if size > 1 else ():
            if len(under_way) >= min(3, count):
                finish()
            came = torch.empty_like(hop.target) if hop.combines else hop.target
            handles = exchange(hop.outgoing, (rank + 1) % size, came, (rank - 1) % size, group)
            under_way.append((hop, came, list(handles)))
            del came, handles
        while under_way:
            finish()
