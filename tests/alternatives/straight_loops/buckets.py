# for: 3.9
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, rank_in


def partition(tensors: Sequence[Tensor], limit: int, first_limit: int) -> list[list[int]]:
    if not limit > 0 or not first_limit > 0:
        raise ValueError("a bucket must be allowed to hold something: positive limits")
    kinds: dict[Hashable, list[int]] = {}
    for position, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    found: list[list[int]] = []
    for positions in kinds.values():
        room, mine = (first_limit, [])
        for position in positions:
            nbytes = tensors[position].numel() * tensors[position].element_size()
            if mine and nbytes > room:
                found.append(mine)
                mine, room = ([], limit)
            mine.append(position)
            room -= nbytes
        found.append(mine)
    found.sort(key=max)
    return found


class Bucket:
    def __init__(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        self.index = index
        self.parameters = list(parameters)
        self.buffer: Tensor
        self.views: list[Tensor]
        total = sum(p.numel() for p in parameters)
        self.buffer = parameters[0].detach().new_empty((total,))
        self.views, begin = ([], 0)
        for p in parameters:
            self.views.append(laid_out_like(p, self.buffer.narrow(0, begin, p.numel())))
            begin += p.numel()

    def take(self, k: int, share: float = 1.0) -> None:
        p, view = (self.parameters[k], self.views[k])
        with torch.no_grad():
            if p.grad is None:
                view.fill_(0)
            elif p.grad.is_sparse or p.grad.layout is not torch.strided:
                raise ValueError(f"gradient {k} of bucket {self.index} is {p.grad.layout}")
            elif p.grad is not view and p.grad.data_ptr() != view.data_ptr():
                if share == 1:
                    view.copy_(p.grad)
                else:
                    torch.mul(p.grad, share, out=view)
            elif share != 1:
                view *= share
        p.grad = view


def laid_out_like(p: Tensor, flat: Tensor) -> Tensor:
    dims = sorted(range(p.dim()), key=p.stride, reverse=True)
    return flat.view([p.shape[d] for d in dims]).permute([dims.index(d) for d in range(p.dim())])


def make_buckets(parameters: Sequence[nn.Parameter], limit: int, first_limit: int) -> list[Bucket]:
    lists = partition(parameters, limit, first_limit)
    buckets = [Bucket(i, [parameters[j] for j in lists[i]]) for i in range(len(lists))]
    for bucket in buckets:
        for k in range(len(bucket.parameters)):
            if bucket.parameters[k].grad is not None:
                bucket.take(k, 1.0)
    return buckets


def order_of_first_rank(
    arrived: Sequence[int], device: torch.device | str, group: Group = None
) -> list[int]:
    first = rank_in(group) == 0
    told = torch.zeros(len(arrived), dtype=torch.long, device=device)
    if first:
        told.copy_(torch.as_tensor([*arrived], dtype=torch.long))
    if told.numel() > 0:
        dist.broadcast(told, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
    return [int(number) for number in told]


def broadcast_tensors(tensors: Sequence[Tensor], limit: int, group: Group = None) -> None:
    is_first = rank_in(group) == 0
    for positions in partition(tensors, limit, limit):
        members = [tensors[i].detach() for i in positions if tensors[i].numel()]
        if not members:
            continue
        if len(members) == 1 and members[0].is_contiguous():
            dist.broadcast(members[0], group=group, group_src=0)
            continue
        flat = members[0].new_empty(sum(m.numel() for m in members))
        parts = [
            f.view(m.shape)
            for f, m in zip(flat.split([m.numel() for m in members]), members, strict=False)
        ]
        if is_first:
            for part, member in zip(parts, members, strict=False):
                part.copy_(member)
        dist.broadcast(flat, group=group, group_src=0)
        if not is_first:
            for part, member in zip(parts, members, strict=False):
                member.copy_(part)
        del flat, parts
