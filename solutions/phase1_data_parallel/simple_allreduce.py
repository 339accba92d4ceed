"""All-reduce from point-to-point messages, three ways, and the cost of each.

All-reduce combines a tensor of N bytes over W ranks and leaves the result on every rank. These
strategies need only sends and receives:

==========  ===============  ================  =================  ===============
strategy    messages in all  bytes in all      bytes sent by the  steps one after
                                               busiest rank       another
==========  ===============  ================  =================  ===============
root        2(W-1)           2(W-1) N          (W-1) N            2(W-1)
direct      W(W-1)           W(W-1) N          (W-1) N            W-1
chain       2(W-1)           2(W-1) N          2N (ends: N)       2(W-1)
ring        2W(W-1)          2(W-1) N          2(W-1)/W N         2(W-1)
==========  ===============  ================  =================  ===============

In the direct strategy every step moves W messages at once, and in the ring as well. (Phase 3 builds
the ring.) With latency α per message and β seconds per byte, steps one after another cost
steps·(α + message·β). Each strategy has another bottleneck: the root's link, the network, the
length of the chain. A rank never sends before its partner can receive. Sends and receives are
posted together, because a send might not return until it has been received.

NCCL adds a rule. It runs the messages of a group one after another, in the order in which they were
started. A message ends only together with its other end. Two ranks that both start a receive, then
a send, wait for each other for ever. Messages of one *batch* have no order among them. NCCL passes
neither int16 nor complex numbers from rank to rank.

Sources: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in
MPICH"; Patarasuk & Yuan 2009 for the lower bound 2(W-1)/W·N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

Op = Literal["sum", "mean", "max", "min", "product"]

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,  # divided at the end
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def check_op(tensor: Tensor, op: str) -> None:
    """Raise ValueError for an unknown ``op``, or the mean of integers, before anything is sent."""
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, not {op!r}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")


def all_reduce_root(tensor: Tensor, op: Op = "sum", root: int = 0, group: Group = None) -> None:
    """Combine ``tensor`` over the ranks of ``group`` through one root, in place on every rank.

    Every rank sends to ``root``, a rank of the group. The root combines in rank order, in the dtype
    of ``tensor``, and sends the result back. All ranks get the same bits: those of a loop over the
    ranks of the group, divided at the end for the mean. ``tensor`` has the same shape and dtype on
    all ranks. It may be empty or strided, on each rank in another way. Nothing beside it changes,
    no gradient is recorded, and a leaf stays a leaf. Cost: 2(W-1) messages of N bytes in all, by
    point-to-point calls only. It ends by NCCL's rules, too: there the messages of a rank run one
    after another, in the order in which they were started. Raises ValueError on every rank, before
    anything is sent, for an unknown ``op``, the mean of anything but floating-point numbers, or a
    root outside the group.
    """
    # --- exercise 1.7: start
    # Step 1: refuse bad arguments first, alike on all ranks
    # Step 2: every rank but the root sends its tensor (contiguous) and receives the result
    # Step 3: the root combines the received tensors in rank order, divides for the mean, and sends
    #         the result to every rank
    # Step 4: write the result into the caller's tensor, also when it is a strided view
    check_op(tensor, op)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is not in the group of {world_size} ranks")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank != root:
        dist.send(result, group=group, group_dst=root)
        dist.recv(result, group=group, group_src=root)
    else:
        values = []
        for peer in range(world_size):
            value = torch.empty_like(result)
            if peer == root:
                value = result
            else:
                dist.recv(value, group=group, group_src=peer)
            values.append(value)
        result = combine(values, op)
        for peer in range(world_size):
            if peer != root:
                dist.send(result, group=group, group_dst=peer)
    tensor.detach().copy_(result)
    # --- exercise 1.7: end


def combine(values: Sequence[Tensor], op: str) -> Tensor:
    """All values, combined in the order given and divided by their number for the mean."""
    result = values[0]
    for value in values[1:]:
        result = COMBINE[op](result, value)
    return result / len(values) if op == "mean" else result


def all_reduce_direct(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Every rank sends its tensor to every other rank and combines for itself, in place.

    Same contract as ``all_reduce_root``, without a root. There are W(W-1) messages of N bytes in
    all, one from each rank to each other. All ranks combine in rank order, so the results are equal
    to the last bit. It ends by NCCL's rules, too: there messages that were not started as one batch
    run one after another.
    """
    # --- exercise 1.8: start
    # Step 1: post all receives (into separate buffers) and all sends as one batch: P2POp,
    #         batch_isend_irecv. NCCL would run separate calls one after another, and all ranks
    #         would begin with a receive. A batch may not be empty: one rank alone makes none
    # Step 2: wait for every handle (NCCL gives one for the batch) before a buffer is read
    # Step 3: combine in rank order: floating-point sums depend on the order
    check_op(tensor, op)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    mine = tensor.detach().clone(memory_format=torch.contiguous_format)
    values = [mine if peer == rank else torch.empty_like(mine) for peer in range(world_size)]
    others = [peer for peer in range(world_size) if peer != rank]
    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer in others]
    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in others]
    handles = dist.batch_isend_irecv(batch) if batch else []
    for handle in handles:
        handle.wait()
    tensor.detach().copy_(combine(values, op))
    # --- exercise 1.8: end


def all_reduce_chain(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine along the chain 0 → 1 → … → W-1 and pass the result back the same way, in place.

    Same contract as ``all_reduce_root``, without a root. There are 2(W-1) messages of N bytes in
    all, only between neighbours. Each rank sends at most 2N bytes, the ends send N. Rank r combines
    the result of ranks 0 … r-1 with its own value, so the bits are those of a loop, too. It ends by
    NCCL's rules, too: no rank starts a receive that waits for messages behind it.
    """
    # --- exercise 1.8: start
    # Step 4: receive from the left (not rank 0), combine, send to the right (not the last rank)
    # Step 5: the last rank holds everything; the result travels back to rank 0
    check_op(tensor, op)
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank > 0:
        partial = torch.empty_like(result)
        dist.recv(partial, group=group, group_src=rank - 1)
        result = COMBINE[op](partial, result)
    if rank < last:
        dist.send(result, group=group, group_dst=rank + 1)
        dist.recv(result, group=group, group_src=rank + 1)
    elif op == "mean":
        result = result / (last + 1)
    if rank > 0:
        dist.send(result, group=group, group_dst=rank - 1)
    tensor.detach().copy_(result)
    # --- exercise 1.8: end


STRATEGIES: dict[str, Callable[..., None]] = {
    "root": all_reduce_root,
    "direct": all_reduce_direct,
    "chain": all_reduce_chain,
}


@dataclass(frozen=True)
class Cost:
    """The cost of an all-reduce of N bytes; ``max_bytes_per_rank`` is sent by the busiest rank."""

    messages: int
    total_bytes: float
    max_bytes_per_rank: float
    steps: int


def communication_cost(strategy: str, world_size: int, nbytes: int) -> Cost:
    """The module's table for ``"root"``, ``"direct"``, ``"chain"`` and, to compare, ``"ring"``.

    ``nbytes`` is the tensor's size N. One rank alone costs nothing. A chain of two has only ends.
    Raises ValueError for an unknown strategy.
    """
    # --- exercise 1.8: start
    # Step 6: write down the formulas, also for W = 1 and for a chain of two, which has only ends
    w, n = world_size, nbytes
    costs = {
        "root": Cost(2 * (w - 1), 2 * (w - 1) * n, (w - 1) * n, 2 * (w - 1)),
        "direct": Cost(w * (w - 1), w * (w - 1) * n, (w - 1) * n, w - 1),
        "chain": Cost(2 * (w - 1), 2 * (w - 1) * n, min(w - 1, 2) * n, 2 * (w - 1)),
        "ring": Cost(2 * w * (w - 1), 2 * (w - 1) * n, 2 * (w - 1) / w * n, 2 * (w - 1)),
    }
    if strategy not in costs:
        raise ValueError(f"strategy must be one of {', '.join(costs)}, not {strategy!r}")
    return costs[strategy]
    # --- exercise 1.8: end
