# for: 3.5
"""Written differently: a tree by rounds instead of links, receives posted ahead."""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase3_multi_node.tree_allreduce import *
from solutions.phase3_multi_node.tree_allreduce import check_arguments, check_root


def _combined(a, b, op):
    return torch.maximum(a, b) if op == "max" else a + b


def tree_links(rank, root, world_size):
    """By rounds: in round k numbers that are odd multiples of 2^k send to the one 2^k below."""
    number, parent, children = (rank - root) % world_size, None, []
    for k in range(32):
        step = 2**k
        if step >= world_size or parent is not None:
            break
        if (number >> k) % 2:
            parent = (number - step + root) % world_size
        elif number + step < world_size:
            children.append((number + step + root) % world_size)
    return parent, children


def tree_reduce(tensor, root=0, op="sum", group=None):
    rank, w = check_arguments(tensor, op, group)
    check_root(root, w)
    total = _up(tensor.detach().contiguous(), rank, root, w, op, group)
    if rank == root:
        tensor.detach().copy_(total)


def _up(mine, rank, root, w, op, group):
    """This rank's total; the children's totals are expected all at once, each in its place."""
    if not mine.numel():
        return mine
    parent, children = tree_links(rank, root, w)
    inboxes = [torch.empty_like(mine) for _ in children]
    handles = [
        dist.irecv(inbox, group=group, group_src=child)
        for inbox, child in zip(inboxes, children, strict=True)
    ]
    for inbox, handle in zip(inboxes, handles, strict=True):
        handle.wait()
        mine = _combined(mine, inbox, op)
    if parent is not None:
        dist.isend(mine, group=group, group_dst=parent).wait()
    return mine / w if op == "mean" and parent is None else mine


def tree_broadcast(tensor, root=0, group=None):
    rank, w = check_arguments(tensor, "sum", group)
    check_root(root, w)
    data = tensor.detach().contiguous()
    if data.numel():
        parent, children = tree_links(rank, root, w)
        if parent is not None:
            dist.irecv(data, group=group, group_src=parent).wait()
        for child in children[::-1]:  # all at once, the far one might come last
            dist.isend(data, group=group, group_dst=child).wait()
    if not tensor.is_contiguous():
        tensor.detach().copy_(data)


def tree_all_reduce(tensor, op="sum", group=None):
    rank, w = check_arguments(tensor, op, group)
    total = _up(tensor.detach().contiguous(), rank, w - 1, w, op, group)
    if rank == w - 1:
        tensor.detach().copy_(total)
    tree_broadcast(tensor, w - 1, group)
