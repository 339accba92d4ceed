# for: 3.33
"""Written differently: a tensor of all ranks with a dimension per axis, and whole index tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from given.agreement import device_in
from given.mesh_parts import Axes


class Grid(Axes):
    @property
    def table(self):
        return torch.arange(self.world_size).reshape([*self.sizes.values()])

    def coordinates(self, rank):
        return dict(zip(self.sizes, (self.table == rank).nonzero()[0].tolist(), strict=True))

    def line(self, rank, axes, on=None):
        if not {*axes} <= {*self.sizes}:
            raise ValueError("an axis is not there")
        here, keep = self.coordinates(rank), torch.ones_like(self.table, dtype=torch.bool)
        for dim, (axis, size) in enumerate(self.sizes.items()):
            wanted = (on or {}).get(axis, range(size)) if axis in axes else [here[axis]]
            row = torch.tensor([c in wanted for c in range(size)])
            keep &= row.view([-1 if d == dim else 1 for d in range(keep.dim())])
        return tuple(self.table[keep].tolist())


def bytes_leaving(grid, traffic, node_size):
    nodes = grid.table // node_size
    total = torch.zeros(int(nodes.max()) + 1, dtype=torch.float64)
    for dim, axis in enumerate(grid.sizes):
        away = (nodes != nodes.roll(-1, dim)).double() * traffic.get(axis, 0)
        total.index_add_(0, nodes.flatten(), away.flatten())
    return float(total.max())


def arranged(grid, traffic, node_size):
    best = None
    for order in itertools.permutations(grid.sizes):
        candidate = Grid({axis: grid.sizes[axis] for axis in order}, grid.batch)
        cost = bytes_leaving(candidate, traffic, node_size)
        if best is None or cost < best[0]:
            best = cost, candidate
    return best[1]


@dataclass(frozen=True, kw_only=True)
class Spec:
    shape: tuple
    cut: dict = field(default_factory=dict)
    on: dict = field(default_factory=dict)
    partial: tuple = ()
    done: tuple = ()

    def bounds(self, grid, rank):
        here = grid.coordinates(rank)
        ranges = [range(n) for n in self.shape]
        for axis, dim in self.cut.items():
            most = math.ceil(len(ranges[dim]) / grid.sizes[axis])
            ranges[dim] = ranges[dim][here[axis] * most :][:most]
        return [(r.start, r.start + len(r)) for r in ranges]

    def rule(self, grid):
        axes, divisor = [], 1
        for axis, size in grid.sizes.items():
            if axis in self.done:
                continue
            if axis not in self.cut and (axis in grid.batch or axis in self.partial):
                axes.append(axis)
            if axis in grid.batch and axis not in self.partial:
                divisor *= size
        return axes, divisor

    def first_holder(self, grid, rank):
        others = [axis for axis in grid.sizes if axis not in self.cut]
        holders = grid.line(rank, others, self.on)
        return rank == holders[0]


class Mesh:
    def __init__(self, grid, layout, joined=()):
        if dist.get_world_size() != grid.table.numel():
            raise ValueError("another number of ranks")
        for spec in layout.values():
            if not {*spec.cut, *spec.on, *spec.partial, *spec.done} <= {*grid.sizes}:
                raise ValueError("an axis is not there")
        self.grid, self.layout, self.rank, self.mine = grid, layout, dist.get_rank(), {}
        lines = [([axis], None) for axis in grid.sizes] + [(axes, None) for axes in joined]
        lines += [(spec.rule(grid)[0], spec.on) for spec in layout.values()]
        every = {grid.line(r, *line) for line in lines for r in range(grid.world_size)}
        for ranks in sorted(every):
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                self.mine[ranks] = group

    def group(self, *axes):
        found = self.mine.get(self.grid.line(self.rank, axes))
        if found is None:
            raise ValueError("this group was not made")
        return found

    def reduce_gradients(self, parameters):
        found = {}
        for name, spec in self.layout.items():
            if name in parameters and parameters[name].requires_grad:
                axes, divisor = spec.rule(self.grid)
                ranks = self.grid.line(self.rank, axes, spec.on)
                found.setdefault((ranks, parameters[name].dtype), []).append((name, divisor))
        for (ranks, dtype), members in found.items():
            ps = [parameters[name] for name, _ in members]
            if len(ranks) == 1:
                for p, (_, divisor) in zip(ps, members, strict=True):
                    p.grad = None if p.grad is None else p.grad / divisor
                continue
            for p in ps:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            message = torch.empty(sum(p.numel() for p in ps), dtype=dtype, device=ps[0].device)
            places = message.split([p.numel() for p in ps])
            for p, place in zip(ps, places, strict=True):
                place.copy_(p.grad.reshape(-1))
            dist.all_reduce(message, group=self.mine[ranks])
            for p, place, (_, divisor) in zip(ps, places, members, strict=True):
                p.grad.copy_(place.view(p.shape) / divisor)

    def clip(self, parameters, max_norm):
        if not max_norm > 0:
            raise ValueError("the limit must be positive")
        own = {n: p.grad for n, p in parameters.items() if p.requires_grad and p.grad is not None}
        mine = [g for n, g in own.items() if self.layout[n].first_holder(self.grid, self.rank)]
        total = torch.zeros(1, dtype=torch.float64, device=device_in(None))
        for grad in mine:
            total += grad.double().square().sum().to(total.device)
        dist.all_reduce(total)
        norm = float(total) ** 0.5
        if norm > max_norm and norm != math.inf:
            for grad in own.values():
                grad *= max_norm / norm
        return norm

    def pieces(self, tensors):
        return [
            {
                "name": name,
                "shape": list(self.layout[name].shape),
                "first": [low for low, _ in self.layout[name].bounds(self.grid, self.rank)],
                "values": tensor.detach().clone(),
            }
            for name, tensor in tensors.items()
            if tensor.numel() and self.layout[name].first_holder(self.grid, self.rank)
        ]

    def load(self, tensors, pieces):
        wholes = {}
        for piece in pieces:
            name, values = piece["name"], piece["values"]
            if name not in tensors:
                continue
            if list(self.layout[name].shape) != piece["shape"]:
                raise ValueError("another shape")
            if name not in wholes:
                whole = torch.zeros(piece["shape"], dtype=values.dtype)
                wholes[name] = whole, torch.zeros(piece["shape"], dtype=torch.bool)
            place = tuple(
                slice(low, low + n) for low, n in zip(piece["first"], values.shape, strict=True)
            )
            wholes[name][0][place], wholes[name][1][place] = values.cpu(), True
        new = {}
        for name, tensor in tensors.items():
            bounds = self.layout[name].bounds(self.grid, self.rank)
            own = tuple(slice(*pair) for pair in bounds)
            if tensor.numel() and (name not in wholes or not wholes[name][1][own].all()):
                raise ValueError("elements are missing")
            new[name] = wholes[name][0][own] if tensor.numel() else tensor.detach().clone()
        for name, tensor in tensors.items():
            tensor.detach().copy_(new[name])
