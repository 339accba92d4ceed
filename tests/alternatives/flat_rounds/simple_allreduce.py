# alternative for: 1.7, 1.8
"""All receives of the root at once, the direct exchange round by round, a chain of handles."""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.simple_allreduce import *
from solutions.phase1_data_parallel.simple_allreduce import Cost


def dense(tensor):
    """A contiguous copy."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def all_reduce_root(tensor, op="sum", root=0, group=None):
    check_op(tensor, op)
    size = dist.get_world_size(group)
    if root not in range(size):
        raise ValueError(f"the group of {size} ranks has no rank {root}")
    source = tensor.detach()
    own = dense(source)
    others = [peer for peer in range(size) if peer != root]
    if dist.get_rank(group) != root:
        answer = torch.empty_like(own)
        dist.isend(own, group=group, group_dst=root).wait()
        dist.irecv(answer, group=group, group_src=root).wait()
    else:
        inbox = {peer: torch.empty_like(own) for peer in others}
        for handle in [dist.irecv(inbox[peer], group=group, group_src=peer) for peer in others]:
            handle.wait()
        inbox[root] = own
        answer = combine([inbox[peer] for peer in range(size)], op).contiguous()
        for handle in [dist.isend(answer, group=group, group_dst=peer) for peer in others]:
            handle.wait()
    source.copy_(answer)


def all_reduce_direct(tensor, op="sum", group=None):
    check_op(tensor, op)
    size, me = dist.get_world_size(group), dist.get_rank(group)
    source = tensor.detach()
    own = dense(source)
    gathered = torch.empty((size, *own.shape), dtype=own.dtype, device=own.device)
    gathered[me] = own
    for distance in range(1, size):  # to the right, from the left
        to, origin = (me + distance) % size, (me - distance) % size
        there = dist.P2POp(dist.isend, own, None, group, 0, to)
        back = dist.P2POp(dist.irecv, gathered[origin], None, group, 0, origin)
        for handle in dist.batch_isend_irecv([there, back]):
            handle.wait()
    source.copy_(combine(list(gathered), op))


def all_reduce_chain(tensor, op="sum", group=None):
    check_op(tensor, op)
    size, me = dist.get_world_size(group), dist.get_rank(group)
    source = tensor.detach()
    own = dense(source)
    answer = torch.empty_like(own)  # the result comes into a buffer of its own
    if me:
        theirs = torch.empty_like(own)
        dist.irecv(theirs, group=group, group_src=me - 1).wait()
        own = combine([theirs, own], "sum" if op == "mean" else op).contiguous()
    if me + 1 < size:
        dist.isend(own, group=group, group_dst=me + 1).wait()
        dist.irecv(answer, group=group, group_src=me + 1).wait()
    else:
        answer = own / size if op == "mean" else own
    if me:
        dist.isend(answer, group=group, group_dst=me - 1).wait()
    source.copy_(answer)


STRATEGIES = {"root": all_reduce_root, "direct": all_reduce_direct, "chain": all_reduce_chain}


def communication_cost(strategy, world_size, nbytes):
    if strategy not in ("root", "direct", "chain", "ring"):
        raise ValueError(f"there is no strategy {strategy!r}")
    others = world_size - 1
    if others == 0:
        return Cost(messages=0, total_bytes=0, max_bytes_per_rank=0, steps=0)
    if strategy == "direct":
        return Cost(world_size * others, world_size * others * nbytes, others * nbytes, others)
    messages, busiest = 2 * others, float(others * nbytes)
    if strategy == "chain":
        busiest = min(2, others) * nbytes
    elif strategy == "ring":
        messages, busiest = messages * world_size, 2 * others * nbytes / world_size
    return Cost(messages, 2 * others * nbytes, busiest, 2 * others)
