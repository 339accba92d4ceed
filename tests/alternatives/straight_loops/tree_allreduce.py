# for: 3.5
"""Written from the docstrings alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

from .ring_allreduce import COMBINE, Op, check_arguments, flattened


def tree_links(rank: int, root: int, world_size: int) -> tuple[int | None, list[int]]:
    number = (rank - root) % world_size
    bits = [1 << k for k in range(world_size.bit_length())]
    own = next((bit for bit in bits if number & bit), None)
    lower = bits if own is None else [bit for bit in bits if bit < own]
    children = [(rank + bit) % world_size for bit in lower if number + bit < world_size]
    return (None if own is None else (rank - own) % world_size, children)


def check_root(root: int, world_size: int) -> None:
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is not in the group of {world_size} ranks")


def climb(total: Tensor, root: int, op: str, group: Group) -> None:
    size = dist.get_world_size(group)
    parent, children = tree_links(dist.get_rank(group), root, size)
    if total.numel():
        for child in children:
            came = torch.empty_like(total)
            dist.irecv(came, group=group, group_src=child).wait()
            COMBINE[op](total, came)
            del came
        if parent is not None:
            dist.isend(total, group=group, group_dst=parent).wait()
    if parent is None and op == "mean":
        total /= size


def tree_reduce(tensor: Tensor, root: int = 0, op: Op = "sum", group: Group = None) -> None:
    rank, size = check_arguments(tensor, op, group)
    check_root(root, size)
    own = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    climb(own, root, op, group)
    if rank == root:
        tensor.detach().copy_(own.view(tensor.shape))


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    rank, size = check_arguments(tensor, "sum", group)
    check_root(root, size)
    parent, children = tree_links(rank, root, size)
    with flattened(tensor) as flat:
        if flat.numel():
            if parent is not None:
                dist.irecv(flat, group=group, group_src=parent).wait()
            for child in children[::-1]:
                dist.isend(flat, group=group, group_dst=child).wait()


def tree_all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    _, size = check_arguments(tensor, op, group)
    root = size - 1
    with flattened(tensor) as flat:
        climb(flat, root, op, group)
        tree_broadcast(flat, root, group)
