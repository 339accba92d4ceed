# for: 3.33
"""Written differently: every question is answered by going through all ranks of the grid."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import permutations, product

import torch
import torch.distributed as dist

from given.agreement import device_in
from given.mesh_parts import Axes, Block, fill


class Grid(Axes):
    def everyone(self):
        return [*product(*map(range, self.sizes.values()))]

    def coordinates(self, rank):
        return dict(zip(self.sizes, self.everyone()[rank], strict=True))

    def line(self, rank, axes, on=None):
        self.expect_axes(axes)
        mine, found = self.everyone()[rank], []
        for other, place in enumerate(self.everyone()):
            for axis, own, there in zip(self.sizes, mine, place, strict=True):
                allowed = (on or {}).get(axis, [there]) if axis in axes else [own]
                if there not in allowed:
                    break
            else:
                found.append(other)
        return tuple(found)


def bytes_leaving(grid, traffic, node_size):
    sent, everyone = defaultdict(float), grid.everyone()
    numbers = {place: rank for rank, place in enumerate(everyone)}
    for rank, place in enumerate(everyone):
        for dim, (axis, size) in enumerate(grid.sizes.items()):
            after = (*place[:dim], (place[dim] + 1) % size, *place[dim + 1 :])
            if numbers[after] // node_size != rank // node_size:
                sent[rank // node_size] += traffic.get(axis, 0)
    return max(sent.values(), default=0.0)


def arranged(grid, traffic, node_size):
    costs = {}
    for order in permutations(grid.sizes):
        candidate = Grid({axis: grid.sizes[axis] for axis in order}, grid.batch)
        costs.setdefault(bytes_leaving(candidate, traffic, node_size), candidate)
    return costs[min(costs)]


@dataclass(frozen=True, kw_only=True)
class Spec:
    shape: tuple
    cut: dict = field(default_factory=dict)
    on: dict = field(default_factory=dict)
    partial: tuple = ()
    done: tuple = ()

    def bounds(self, grid, rank):
        found = []
        for dim, length in enumerate(self.shape):
            low, high = 0, length
            for axis in (axis for axis, where in self.cut.items() if where == dim):
                most = math.ceil((high - low) / grid.sizes[axis])
                index = grid.coordinates(rank)[axis]
                low, high = min(low + index * most, high), min(low + (index + 1) * most, high)
            found.append((low, high))
        return found

    def rule(self, grid):
        open_axes = [a for a in grid.sizes if a not in self.done]
        summed = [a for a in open_axes if a not in self.cut and a in {*grid.batch, *self.partial}]
        divided = [a for a in open_axes if a in grid.batch and a not in self.partial]
        return summed, math.prod([grid.sizes[a] for a in divided])

    def first_holder(self, grid, rank):
        for axis, own in grid.coordinates(rank).items():
            if axis in self.cut:
                continue
            if own != (min(self.on[axis]) if axis in self.on else 0):
                return False
        return True


class Mesh:
    def __init__(self, grid, layout, joined=()):
        if grid.world_size != dist.get_world_size():
            raise ValueError("the grid is for another world")
        for spec in layout.values():
            for named in (spec.cut, spec.on, spec.partial, spec.done):
                grid.expect_axes(named)
        self.grid, self.layout, self.rank = grid, layout, dist.get_rank()
        asked = [*((axis,) for axis in grid.sizes), *joined]
        sets = [grid.line(r, axes) for axes in asked for r in range(grid.world_size)]
        for spec in layout.values():
            sets += [grid.line(r, spec.rule(grid)[0], spec.on) for r in range(grid.world_size)]
        self.made = {}
        for ranks in sets:
            if ranks not in self.made:
                self.made[ranks] = dist.new_group(list(ranks))

    def group(self, *axes):
        ranks = self.grid.line(self.rank, axes)
        if ranks not in self.made:
            raise ValueError("ask for it when the mesh is made")
        return self.made[ranks]

    def reduce_gradients(self, parameters):
        todo = defaultdict(list)
        for name, spec in self.layout.items():
            if name in parameters and parameters[name].requires_grad:
                axes, _ = spec.rule(self.grid)
                ranks = self.grid.line(self.rank, axes, spec.on)
                todo[ranks, parameters[name].dtype].append(name)
        handles = []
        for (ranks, _), names in todo.items():
            if len(ranks) == 1:
                continue
            flat = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                    for p in (parameters[name] for name in names)
                ]
            )
            work = dist.all_reduce(flat, group=self.made[ranks], async_op=True)
            handles.append((work, flat, names))
        for work, flat, names in handles:
            work.wait()
            for name in names:
                p = parameters[name]
                p.grad, flat = flat[: p.numel()].reshape(p.shape).clone(), flat[p.numel() :]
        for names in todo.values():
            for name in names:
                if parameters[name].grad is not None:
                    parameters[name].grad /= self.layout[name].rule(self.grid)[1]

    def clip(self, parameters, max_norm):
        if math.isnan(max_norm) or max_norm <= 0:
            raise ValueError("the limit must be positive")
        used = {n: p for n, p in parameters.items() if p.requires_grad and p.grad is not None}
        total = torch.zeros((), dtype=torch.float64, device=device_in(None))
        for name, p in used.items():
            share = float(self.layout[name].first_holder(self.grid, self.rank))
            if share:
                total += (p.grad.double() ** 2).sum().to(total.device)
        dist.all_reduce(total)
        norm = math.sqrt(total.item())
        if math.isfinite(norm) and norm > max_norm:
            for p in used.values():
                p.grad *= max_norm / norm
        return norm

    def pieces(self, tensors):
        out = []
        for name, tensor in tensors.items():
            spec = self.layout[name]
            if not tensor.numel() or not spec.first_holder(self.grid, self.rank):
                continue
            out.append(
                {
                    "name": name,
                    "shape": [*spec.shape],
                    "first": [low for low, _ in spec.bounds(self.grid, self.rank)],
                    "values": torch.clone(tensor.detach()),
                }
            )
        return out

    def load(self, tensors, pieces):
        where = {n: self.layout[n].bounds(self.grid, self.rank) for n in tensors}
        own = {n: Block(t.detach(), self.layout[n].shape, where[n]) for n, t in tensors.items()}
        fill(own, pieces)
