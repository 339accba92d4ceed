# for: 3.32
"""Written differently: a column of places in the message for each element, and gradients that wait
for their message are kept beside the leaves."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from given.fsdp_order import OrderedUnits
from given.fsdp_units import FlatUnit, alike, placed_parameters


def own_rows(whole, rank, world_size):
    rows = whole if whole.dim() else whole[None]
    most = -(-rows.shape[0] // world_size)
    return rows[rank * most :][:most]


class Rows:
    def __init__(self, parameters, group):
        self.group, self.width = group, 0
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.places, self.parameters = list(parameters.values()), []
        for old in parameters:
            own = own_rows(old.detach(), self.rank, self.size)
            shard = nn.Parameter(own.contiguous().clone(), requires_grad=old.requires_grad)
            most = own_rows(old.detach(), 0, self.size).numel()
            room = torch.empty(old.numel(), dtype=old.dtype, device=old.device)
            leaf = nn.Parameter(room.data.view(old.shape), requires_grad=old.requires_grad)
            self.parameters.append((shard, leaf, room, self.width, most))
            self.width += most
        self.leaves = [leaf for _, leaf, *_ in self.parameters]
        self.later = {}
        self.gathered = True
        self.flying = self.reducing = None
        self.free()

    def set(self, which):
        for entry, places in zip(self.parameters, self.places, strict=True):
            for owner, name, _ in places:
                setattr(owner, name, entry[which])

    def start_gather(self):
        if self.gathered or self.flying is not None:
            return
        table = self.leaves[0].new_zeros(self.size, self.width, requires_grad=False)
        for shard, _, _, first, _ in self.parameters:
            table[self.rank, first : first + shard.numel()] = shard.detach().flatten()
        mine = table[self.rank].clone()
        work = dist.all_gather_into_tensor(table.view(-1), mine, group=self.group, async_op=True)
        self.flying = work, table

    def finish_gather(self):
        if self.flying is None:
            return
        work, table = self.flying
        work.wait()
        self.flying, self.gathered = None, True
        for shard, leaf, room, first, most in self.parameters:
            room.untyped_storage().resize_(room.nbytes)
            leaf.requires_grad_(shard.requires_grad)
            for rank, rows in enumerate(room.split(most) if most else ()):
                rows.copy_(table[rank, first : first + rows.numel()])
        self.set(1)

    def free(self):
        if self.flying is not None:
            self.flying[0].wait()
            self.flying = None
        if self.gathered:
            self.set(0)
            for _, _, room, *_ in self.parameters:
                room.untyped_storage().resize_(0)
        self.gathered = False

    def keep(self):
        """Move gradients from the leaves, to add them to a later message."""
        for number, leaf in enumerate(self.leaves):
            if leaf.grad is not None:
                before = self.later.pop(number, None)
                self.later[number] = leaf.grad if before is None else before + leaf.grad
                leaf.grad = None

    def start_reduce(self):
        self.keep()
        asked = [k for k, entry in enumerate(self.parameters) if entry[0].requires_grad]
        if not self.later.keys() & set(asked):
            return
        width = sum(self.parameters[k][4] for k in asked)
        table = self.leaves[0].new_zeros(self.size, width, requires_grad=False)
        first = 0
        for k in asked:
            most = self.parameters[k][4]
            if k in self.later and most:
                for rank, rows in enumerate(self.later[k].reshape(-1).split(most)):
                    table[rank, first : first + rows.numel()] = rows
            first += most
        self.later.clear()
        own = table.new_empty(width)
        work = dist.reduce_scatter_tensor(own, table.view(-1), group=self.group, async_op=True)
        self.reducing, self.asked = (work, own, table), asked

    def finish_reduce(self):
        if self.reducing is not None:
            work, own, _ = self.reducing
            work.wait()
            self.reducing, first = None, 0
            for k in self.asked:
                shard, *_, most = self.parameters[k]
                mean = own[first : first + shard.numel()].view_as(shard) / self.size
                shard.grad = mean + (0 if shard.grad is None else shard.grad)
                first += most


class PerParameterFSDP(OrderedUnits):
    def __init__(self, module, units=(), *, group=None):
        super().__init__()
        self.module, self.group, self.quiet = module, group, []
        owned = placed_parameters(module, units, group)
        for part, mine in zip((module, *units), owned, strict=True):
            flats = [Rows(same, group) for same in alike(mine, lambda p: p.dtype)]
            self.units.append(FlatUnit(part, flats))
        self.watch_units()

    def fixed(self):
        return [f"{p.dtype} {p.device}" for p in self.parameters()]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def before_forward(self, unit):
        if unit is self.units[0] and not self.ended:
            for flat in (flat for each in self.units for flat in each.flats):
                flat.later.clear()
        super().before_forward(unit)

    @contextmanager
    def no_sync(self):
        self.quiet.append(None)
        try:
            yield
        finally:
            self.quiet.pop()

    def after_backward(self, unit):
        unit.free()
        if self.quiet:
            for flat in unit.flats:
                flat.keep()
        else:
            for other in self.units:
                other.finish_reduce()
            unit.start_reduce()
