# alternative for: 1.7, 1.8
"""Asynchronous root, batched direct exchange, chain as a loop over links."""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.simple_allreduce import Cost, check_op


def _reduce(stacked, op):
    if op in ("max", "min"):
        return {"max": torch.amax, "min": torch.amin}[op](stacked, dim=0)
    result = stacked[0].clone()
    for row in stacked[1:]:
        result = result.mul_(row) if op == "product" else result.add_(row)
    return result / len(stacked) if op == "mean" else result


def _global(group, rank):
    return dist.get_global_rank(group or dist.group.WORLD, rank)


@torch.no_grad()
def all_reduce_root(tensor, op="sum", root=0, group=None):
    """The root posts all receives at once."""
    check_op(tensor, op)
    w, me = dist.get_world_size(group), dist.get_rank(group)
    if root not in range(w):
        raise ValueError(f"no rank {root} in this group")
    data = tensor.clone(memory_format=torch.contiguous_format)
    if me == root:
        inbox = data.new_empty((w, *data.shape))
        inbox[me] = data
        handles = [
            dist.irecv(inbox[r], _global(group, r), group=group) for r in range(w) if r != me
        ]
        for handle in handles:
            handle.wait()
        data = _reduce(inbox, op).to(tensor.dtype)
        handles = [dist.isend(data, _global(group, r), group=group) for r in range(w) if r != me]
        for handle in handles:
            handle.wait()
    else:
        dist.isend(data, _global(group, root), group=group).wait()
        dist.irecv(data, _global(group, root), group=group).wait()
    tensor.copy_(data)


@torch.no_grad()
def all_reduce_direct(tensor, op="sum", group=None):
    """batch_isend_irecv; each row of the inbox is one rank's value."""
    check_op(tensor, op)
    w, me = dist.get_world_size(group), dist.get_rank(group)
    inbox = tensor.new_empty((w, *tensor.shape))
    inbox[me] = tensor
    mine = inbox[me].clone()
    ops = []
    for r in range(w):
        if r != me:
            peer = _global(group, r)
            ops.append(dist.P2POp(dist.isend, mine, peer, group))
            ops.append(dist.P2POp(dist.irecv, inbox[r], peer, group))
    for handle in dist.batch_isend_irecv(ops) if ops else []:
        handle.wait()
    result = inbox[0].clone()
    for row in inbox[1:]:
        if op in ("sum", "mean"):
            result += row
        elif op == "product":
            result *= row
        else:
            result = torch.maximum(result, row) if op == "max" else torch.minimum(result, row)
    tensor.copy_(result / w if op == "mean" else result)


@torch.no_grad()
def all_reduce_chain(tensor, op="sum", group=None):
    """Link by link: in round k only ranks k and k+1 are busy, forth and then back."""
    check_op(tensor, op)
    w, me = dist.get_world_size(group), dist.get_rank(group)
    value = tensor.clone(memory_format=torch.contiguous_format)
    for link in range(w - 1):
        if me == link:
            dist.send(value, _global(group, link + 1), group=group)
        elif me == link + 1:
            got = torch.empty_like(value)
            dist.recv(got, _global(group, link), group=group)
            value = _reduce(torch.stack([got, value]), "sum" if op == "mean" else op)
    if me == w - 1 and op == "mean":
        value = value / w
    for link in reversed(range(w - 1)):
        if me == link + 1:
            dist.send(value, _global(group, link), group=group)
        elif me == link:
            dist.recv(value, _global(group, link + 1), group=group)
    tensor.copy_(value)


STRATEGIES = {"root": all_reduce_root, "direct": all_reduce_direct, "chain": all_reduce_chain}


def communication_cost(strategy, world_size, nbytes):
    links = world_size - 1
    if strategy == "direct":
        return Cost(links * world_size, links * world_size * nbytes, links * nbytes, links)
    if strategy == "ring":
        return Cost(
            2 * links * world_size, 2 * links * nbytes, 2 * nbytes * links / world_size, 2 * links
        )
    if strategy not in ("root", "chain"):
        raise ValueError(f"unknown: {strategy}")
    busiest = links if strategy == "root" else (0, 1, 2)[min(links, 2)]
    return Cost(2 * links, 2 * links * nbytes, busiest * nbytes, 2 * links)
