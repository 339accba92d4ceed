"""The mesh: ranks in a grid with named axes, so that any strategies can be put together.

Each strategy has an axis of the grid, and works among the ranks that differ on that axis alone.
A rank's number is its place in row-major order, so the last axis has neighbours:

    Grid({"pipeline": 2, "data": 2, "tensor": 2})     rank = (p·2 + d)·2 + t
    pipeline 0    data 0: ranks 0 1   data 1: 2 3     data group of rank 4: 4, 6
    pipeline 1    data 0: ranks 4 5   data 1: 6 7     its tensor group: 4, 5

Which axis gets the neighbours? Let an axis have n ranks in steps of s, on nodes of L ranks, where s
and s·n divide L or are multiples of it. Rings along the axis send from each node

    0 bytes if s·n ≤ L, else min(s, L)·b       b: bytes that a rank sends to the next, per step

A parameter's spec says what each axis does to it. All else follows. Its gradient is summed over
some axes and divided by a number. One rank counts its elements for the norm and writes them. So a
step sends one all-reduce per set of ranks and dtype, and one of 8 bytes.
Invariant: a step equals that of one process with the whole batch and the whole model.

Sources: Shazeer et al. 2018 (Mesh-TensorFlow, arXiv 1811.02084), section 2. Narayanan et al. 2021
(arXiv 2104.04473), section 3. Liang et al. 2024 (TorchTitan, arXiv 2410.06511), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import device_in
from given.mesh_parts import Axes, Block, Piece, fill


class Grid(Axes):
    """Where each rank is, and which ranks are on a line; ``given/mesh_parts.py`` has the fields."""

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of ``rank`` on each axis, in the order of the axes."""
        # --- exercise 3.33: start
        # Step 1: row-major: each axis is left after the product of all sizes behind it
        found = {}
        for axis, size in reversed([*self.sizes.items()]):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.sizes}
        # --- exercise 3.33: end

    def line(
        self, rank: int, axes: Sequence[str], on: Mapping[str, Sequence[int]] | None = None
    ) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axes`` at most, ascending.

        ``on``: for some axes the coordinates that count. It leaves out ranks with others on
        ``axes``, and says nothing about an axis that is not one of them. Raises ValueError if one
        of ``axes`` is not in the grid.
        """
        # --- exercise 3.33: start
        # Step 2: all coordinates on the chosen axes in rising order, the own one on each other axis
        self.expect_axes(axes)
        ranks, here = [0], self.coordinates(rank)
        for axis, size in self.sizes.items():
            kept = sorted((on or {}).get(axis, range(size))) if axis in axes else [here[axis]]
            ranks = [before * size + own for before in ranks for own in kept]
        return tuple(ranks)
        # --- exercise 3.33: end


def bytes_leaving(grid: Grid, traffic: Mapping[str, float], node_size: int) -> float:
    """The bytes that leave the busiest node in one step.

    The first ``node_size`` ranks are on one node, the next on another, and so on. On each axis a
    rank sends ``traffic`` bytes (0 if it is not named) to the next rank of its line, and the last
    one to the first.
    """
    # --- exercise 3.33: start
    # Step 3: the next rank is a stride further, or at the line's begin: is it on another node?
    ranks, stride = torch.arange(grid.world_size), grid.world_size
    leaving = torch.zeros(grid.world_size, dtype=torch.float64)  # by node
    for axis, size in grid.sizes.items():
        span, stride = stride, stride // size
        after = ranks - ranks % span + (ranks + stride) % span
        away = ranks // node_size != after // node_size
        leaving.index_add_(0, ranks // node_size, away.double() * traffic.get(axis, 0))
    return leaving.max().item()
    # --- exercise 3.33: end


def arranged(grid: Grid, traffic: Mapping[str, float], node_size: int) -> Grid:
    """The same axes and batch, in the order for which ``bytes_leaving`` is least.

    Of equal orders, the one that comes first in ``itertools.permutations`` of the grid's axes.
    """
    # --- exercise 3.33: start
    # Step 4: try all orders. That the axis with most bytes gets the neighbours is not always best
    grids = [Grid(dict(order), grid.batch) for order in permutations(grid.sizes.items())]
    return min(grids, key=lambda one: bytes_leaving(one, traffic, node_size))
    # --- exercise 3.33: end


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How the ranks of a grid hold one parameter of ``shape``.

    - ``cut``: the axes that divide it, and which dimension. The first one divides the parameter,
      each further one divides the block that is left.
    - ``on``: axes of which only these coordinates hold it, such as the stages of a pipeline.
    - ``partial``: axes whose ranks each have a term of the gradient. Their sum is the gradient.
    - ``done``: axes over which somebody else completes the gradient, such as a wrapper.

    Ranks that differ on other axes hold equal copies. On axes that don't divide the batch the
    copies have equal gradients.
    """

    shape: Sequence[int]
    cut: Mapping[str, int] = field(default_factory=dict)
    on: Mapping[str, Sequence[int]] = field(default_factory=dict)
    partial: Sequence[str] = ()
    done: Sequence[str] = ()

    def bounds(self, grid: Grid, rank: int) -> list[tuple[int, int]]:
        """For each dimension the first element of ``rank``'s block, and the first one behind it.

        A cut of n elements by an axis of m ranks gives each ⌈n / m⌉. The last ones have fewer, or
        none: then both numbers are equal.
        """
        # --- exercise 3.33: start
        # Step 5: cut what the cuts before have left
        block, here = [(0, length) for length in self.shape], grid.coordinates(rank)
        for axis, dim in self.cut.items():
            begin, end = block[dim]
            most = -(-(end - begin) // grid.sizes[axis])
            begin = min(begin + here[axis] * most, end)
            block[dim] = begin, min(begin + most, end)
        return block
        # --- exercise 3.33: end

    def rule(self, grid: Grid) -> tuple[list[str], int]:
        """(axes, divisor): sum the gradient over these axes, in the grid's order, then divide it.

        Ranks have the gradient of the mean over their own part of the batch, and equal parts. On an
        axis of the batch the mean over the parts is needed. If the axis cuts the parameter, the
        backward has summed it already, as an expert's rows do. A ``partial`` axis needs the sum
        without a division, a ``done`` one neither.
        """
        # --- exercise 3.33: start
        # Step 6: who has other samples, or another term? Who of them has another block?
        axes = [axis for axis in grid.sizes if axis not in self.done]
        terms = [axis for axis in axes if axis in self.partial or axis in grid.batch]
        means = [axis for axis in terms if axis not in self.partial]
        summed = [axis for axis in terms if axis not in self.cut]
        return summed, math.prod(grid.sizes[axis] for axis in means)
        # --- exercise 3.33: end

    def first_holder(self, grid: Grid, rank: int) -> bool:
        """Whether ``rank`` has the lowest number of all ranks with its block of the parameter."""
        # --- exercise 3.33: start
        # Step 7: the lowest coordinate that holds it, on each axis that doesn't cut it
        here = grid.coordinates(rank).items()
        return all(c == min(self.on.get(axis, (0,))) for axis, c in here if axis not in self.cut)
        # --- exercise 3.33: end


class Mesh:
    """The groups of this rank on ``grid``, and the work on the parameters of ``layout``.

    ``layout``: the specs of all parameters of the whole model by name, also of those that this rank
    does not hold, equal on all ranks. Methods take those that this rank holds, by name.
    ``joined``: sets of axes that need a group of their own.
    """

    def __init__(
        self, grid: Grid, layout: Mapping[str, Spec], joined: Iterable[Sequence[str]] = ()
    ) -> None:
        """Make the groups of each axis, of ``joined``, and of the sums that ``layout`` needs.

        All ranks make all groups in one order. Equal sets of ranks share one group. Raises
        ValueError, on all ranks and before a group is made, if the grid has not as many ranks as
        the world, or if axes are named that it has not.
        """
        if grid.world_size != dist.get_world_size():
            raise ValueError(f"{dict(grid.sizes)} is no grid of {dist.get_world_size()} ranks")
        for spec in layout.values():
            grid.expect_axes([*spec.cut, *spec.on, *spec.partial, *spec.done])
        self.grid, self.layout, self.rank = grid, layout, dist.get_rank()
        # --- exercise 3.33: start
        # Step 8: list the sets of all ranks first, each once; every rank makes all of them
        wanted: list[tuple[Sequence[str], Mapping[str, Sequence[int]]]]
        wanted = [((axis,), {}) for axis in grid.sizes] + [(axes, {}) for axes in joined]
        wanted += [(spec.rule(grid)[0], spec.on) for spec in layout.values()]
        everyone = range(grid.world_size)
        sets = dict.fromkeys(grid.line(r, axes, on) for axes, on in wanted for r in everyone)
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in sets}
        # --- exercise 3.33: end

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one on ``axes`` alone, in any order of them.

        Raises ValueError if it was not made, or if an axis is not in the grid.
        """
        # --- exercise 3.33: start
        # Step 9: a group cannot be made now: other ranks would have to take part
        ranks = self.grid.line(self.rank, axes)
        if ranks not in self.groups:
            raise ValueError(f"no group for the axes {axes}: name them in `joined`")
        return self.groups[ranks]
        # --- exercise 3.33: end

    def reduce_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Complete ``p.grad`` of all ``parameters`` by the rules of their specs.

        One all-reduce per dtype and set of ranks that has a sum, in the dtype of the gradients;
        none among one rank. A missing gradient that must be summed counts as zeros. Others stay
        missing. Frozen parameters are left alone, and are frozen on all ranks or on none.
        """
        # --- exercise 3.33: start
        # Step 10: collect what the same ranks sum, in the layout's order; one message for each
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[nn.Parameter, int]]] = {}
        for name, spec in self.layout.items():
            p = parameters.get(name)
            if p is None or not p.requires_grad:
                continue
            axes, divisor = spec.rule(self.grid)
            ranks = self.grid.line(self.rank, axes, spec.on)
            if len(ranks) > 1:
                buckets.setdefault((ranks, p.dtype), []).append((p, divisor))
            elif p.grad is not None:
                p.grad.div_(divisor)
        for (ranks, _), members in buckets.items():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in members]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self.groups[ranks])
            parts = flat.split([grad.numel() for grad in grads])
            for (p, divisor), part in zip(members, parts, strict=True):
                p.grad = part.view(p.shape).div_(divisor)
        # --- exercise 3.33: end

    def clip(self, parameters: Mapping[str, nn.Parameter], max_norm: float) -> float:
        """Scale all gradients by one factor so that the whole model's norm is at most ``max_norm``.

        Returns the norm before, in float64, the same on every rank: each element of the model
        counts once. One all-reduce of 8 bytes. Frozen parameters and missing gradients do not
        count. A norm that is not finite changes nothing. Raises ValueError, before any message, if
        ``max_norm`` is not positive or is NaN.
        """
        # --- exercise 3.33: start
        # Step 11: the first holder of a block counts it, and all ranks are asked at once. gloo adds
        #          on the CPU, also what GPUs have computed (`device_in`)
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        grads = {n: p.grad for n, p in parameters.items() if p.requires_grad and p.grad is not None}
        squares = torch.zeros((), dtype=torch.float64, device=device_in(None))
        for name, grad in grads.items():
            if self.layout[name].first_holder(self.grid, self.rank):
                own = torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
                squares += own.to(squares.device)
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        if max_norm < norm < math.inf:
            for grad in grads.values():
                grad.mul_(max_norm / norm)
        return norm
        # --- exercise 3.33: end

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """What this rank writes of ``tensors``, the parameters or their optimizer state by name.

        A piece: ``name``, the whole parameter's ``shape``, the ``first`` element of the block on
        each dimension (both lists), and ``values``, a copy of the block. Of all ranks together,
        each element is in one piece; empty blocks are in none. No communication.
        """
        # --- exercise 3.33: start
        # Step 12: the rank that counts a block for the norm writes it
        found = []
        for name, values in tensors.items():
            spec = self.layout[name]
            if values.numel() and spec.first_holder(self.grid, self.rank):
                first = [begin for begin, _ in spec.bounds(self.grid, self.rank)]
                piece = {"name": name, "shape": [*spec.shape], "first": first}
                found.append(piece | {"values": values.detach().clone()})
        return found
        # --- exercise 3.33: end

    def load(self, tensors: Mapping[str, Tensor], pieces: Iterable[Piece]) -> None:
        """Fill ``tensors``, as given to ``pieces``, from the pieces of all ranks of any mesh.

        No communication. Raises ValueError, before anything changes, if the pieces lack an element
        of this rank's blocks, or if a piece is of a parameter with another shape.
        """
        # --- exercise 3.33: start
        # Step 13: say of each tensor which block it is; `fill` finds what block and piece share
        blocks = {}
        for name, values in tensors.items():
            bounds = self.layout[name].bounds(self.grid, self.rank)
            blocks[name] = Block(values.detach(), self.layout[name].shape, bounds)
        fill(blocks, pieces)
        # --- exercise 3.33: end
