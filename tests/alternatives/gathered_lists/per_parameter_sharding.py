# for: 3.32
"""Written differently: lists of chunks travel, and one class keeps the parameters of a dtype."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from given.fsdp_order import OrderedUnits
from given.fsdp_units import FlatUnit, alike, placed_parameters


def own_rows(whole, rank, world_size):
    rows = whole.unsqueeze(0) if whole.dim() == 0 else whole
    most = (rows.shape[0] + world_size - 1) // world_size
    begin = min(rank * most, rows.shape[0])
    return rows.narrow(0, begin, min(most, rows.shape[0] - begin))


class Together:
    """Lists with an entry for each parameter."""

    def __init__(self, parameters, group):
        self.group, self.gathered, self.reducing = group, False, None
        self.size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunks = self.handle = None
        self.places = list(parameters.values())
        self.shards, self.leaves, self.room, self.counts = [], [], [], []
        for parameter in parameters:
            own = own_rows(parameter.detach(), rank, self.size).contiguous().clone()
            self.shards.append(nn.Parameter(own, parameter.requires_grad))
            self.counts.append(own_rows(parameter.detach(), 0, self.size).numel())
            room = own.new_empty(self.size * self.counts[-1])
            self.room.append(room)
            view = room.data[: parameter.numel()].view(parameter.shape)
            self.leaves.append(nn.Parameter(view, parameter.requires_grad))
        self.show(self.shards)
        self.empty()

    def show(self, tensors):
        for tensor, places in zip(tensors, self.places, strict=True):
            for module, name, _ in places:
                setattr(module, name, tensor)

    def empty(self):
        for room in self.room:
            room.untyped_storage().resize_(0)

    def start_gather(self):
        if self.gathered or self.handle:
            return
        mine = self.shards[0].new_zeros(sum(self.counts), requires_grad=False)
        for place, shard in zip(mine.split(self.counts), self.shards, strict=True):
            place[: shard.numel()] = shard.detach().reshape(-1)
        self.chunks = [torch.empty_like(mine) for _ in range(self.size)]
        self.handle = dist.all_gather(self.chunks, mine, group=self.group, async_op=True)

    def finish_gather(self):
        if not self.handle:
            return
        self.handle.wait()
        for room in self.room:
            room.untyped_storage().resize_(room.nbytes)
        for rank, chunk in enumerate(self.chunks):
            for room, part in zip(self.room, chunk.split(self.counts), strict=True):
                room[rank * part.numel() : (rank + 1) * part.numel()] = part
        for shard, leaf in zip(self.shards, self.leaves, strict=True):
            leaf.requires_grad = shard.requires_grad
        self.handle = self.chunks = None
        self.gathered = True
        self.show(self.leaves)

    def free(self):
        if self.handle:
            self.handle.wait()
            self.handle = self.chunks = None
        if self.gathered:
            self.gathered = False
            self.show(self.shards)
            self.empty()

    def start_reduce(self):
        which = [k for k, shard in enumerate(self.shards) if shard.requires_grad]
        if not any(self.leaves[k].grad is not None for k in which):
            return
        chunks = []
        for rank in range(self.size):
            parts = []
            for k in which:
                part = self.leaves[k].new_zeros(self.counts[k], requires_grad=False)
                if self.leaves[k].grad is not None:
                    rows = own_rows(self.leaves[k].grad, rank, self.size).reshape(-1)
                    part[: rows.numel()] = rows
                parts.append(part)
            chunks.append(torch.cat(parts))
        for leaf in self.leaves:
            leaf.grad = None
        own = torch.empty_like(chunks[0])
        work = dist.reduce_scatter(own, chunks, group=self.group, async_op=True)
        self.reducing, self.which = (work, own, chunks[0]), which

    def finish_reduce(self):
        if self.reducing is None:
            return
        work, own, _ = self.reducing
        work.wait()
        self.reducing = None
        parts = own.split([self.counts[k] for k in self.which])
        for k, part in zip(self.which, parts, strict=True):
            shard = self.shards[k]
            mean = part[: shard.numel()].reshape(shard.shape) / self.size
            shard.grad = mean if shard.grad is None else shard.grad.add(mean)


class PerParameterFSDP(OrderedUnits):
    def __init__(self, module, units=(), *, group=None):
        super().__init__()
        owned = placed_parameters(module, units, group)
        self.module, self.group, self.silent = module, group, 0
        for owner, mine in zip([module, *units], owned, strict=True):
            kinds = alike(mine, lambda p: p.dtype)
            self.units.append(FlatUnit(owner, [Together(kind, group) for kind in kinds]))
        self.watch_units()

    def fixed(self):
        return [(p.dtype, p.device) for p in self.parameters()]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    def after_backward(self, unit):
        unit.free()
        if self.silent:
            return
        for each in self.units:
            each.finish_reduce()
        unit.start_reduce()
