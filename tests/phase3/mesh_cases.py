"""What the checks of exercise 3.33 share: grids, parameters on them, and what a rank should hold.

All of it is computed from the whole tensors by indexing, without the functions under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

Sizes = Mapping[str, int]
BATCH = ("data", "shard", "context", "expert")
GRIDS: tuple[dict[str, int], ...] = (
    {"pipeline": 2, "data": 2},
    {"data": 2, "tensor": 2},
    {"shard": 3, "tensor": 2},
    {"expert": 2, "context": 2},
    {"tensor": 3},
    {"pipeline": 3, "expert": 2, "tensor": 1},
    {"data": 2, "pipeline": 2, "shard": 2, "tensor": 2},
    {"context": 2, "pipeline": 3, "expert": 2},
)
SHAPES: dict[str, list[int]] = {
    "embed": [5, 4],
    "up": [7, 4],
    "scale": [],
    "wrapped": [3, 2],
    "experts": [4, 3, 2],
    "down": [4, 6],
    "norm": [4],
}


def batch_of(sizes: Sizes) -> tuple[str, ...]:
    return tuple(axis for axis in BATCH if axis in sizes)


def spec_of(name: str, sizes: Sizes) -> dict[str, Any]:
    """The arguments of a parameter's spec: a GPT in small, on the axes that the grid has."""
    last = sizes.get("pipeline", 1) - 1
    first: dict[str, Any] = {"on": {"pipeline": [0]}}
    end: dict[str, Any] = {"on": {"pipeline": [last]}}
    ends = sorted({0, last}, reverse=True)  # the order of coordinates means nothing
    tied = {"on": {"pipeline": ends}, "partial": ["pipeline"]}
    told = {
        "embed": tied | {"cut": {"tensor": 0}},
        "norm": first | {"partial": ["tensor"]},
        "up": first | {"cut": {"tensor": 0, "shard": 0}, "partial": ["context"]},
        "scale": first,
        "wrapped": first | {"cut": {"shard": 0}, "done": ["shard", "data"]},
        "experts": end | {"cut": {"expert": 0}},
        "down": end | {"cut": {"tensor": 1, "shard": 0}},
    }[name]
    kept: dict[str, Any] = {"shape": SHAPES[name]}
    for key, value in told.items():
        if isinstance(value, Mapping):
            kept[key] = {axis: each for axis, each in value.items() if axis in sizes}
        else:
            kept[key] = [axis for axis in value if axis in sizes]
    return kept


def layout_of(impl: Any, sizes: Sizes) -> dict[str, Any]:
    return {name: impl.Spec(**spec_of(name, sizes)) for name in SHAPES}


def mesh_of(impl: Any, sizes: Sizes) -> Any:
    return impl.Mesh(impl.Grid(sizes, batch_of(sizes)), layout_of(impl, sizes))


def coordinates(sizes: Sizes, rank: int) -> dict[str, int]:
    """By counting through all ranks."""
    return dict(zip(sizes, _counted(tuple(sizes.values()))[rank], strict=True))


@cache
def _counted(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [*product(*map(range, lengths))]


def on_line(sizes, rank: int, axes, on=None) -> list[int]:
    """The ranks that have ``rank``'s coordinates on all other axes."""
    here, found = coordinates(sizes, rank), []
    for other in range(math.prod(sizes.values())):
        there = coordinates(sizes, other)
        near = all(there[a] == here[a] for a in sizes if a not in axes)
        counts = all(there[a] in kept for a, kept in (on or {}).items() if a in axes)
        if near and counts:
            found.append(other)
    return found


def holds(spec: Mapping[str, Any], sizes: Sizes, rank: int) -> bool:
    here = coordinates(sizes, rank)
    return all(here[axis] in kept for axis, kept in spec.get("on", {}).items())


def block(whole: Tensor, spec: Mapping[str, Any], sizes: Sizes, rank: int) -> Tensor:
    """The rank's block of the whole tensor: cut by ``split``, one axis after another."""
    here = coordinates(sizes, rank)
    for axis, dim in spec.get("cut", {}).items():
        parts = whole.split(-(-whole.shape[dim] // sizes[axis]) or 1, dim)
        index = here[axis]
        whole = parts[index] if index < len(parts) else whole.narrow(dim, 0, 0)
    return whole


def whole_values(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 31 + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def parts_of_gradient(name: str, sizes: Sizes, seed: int) -> Tensor:
    """The gradient of each part of the batch: first a dimension per axis of the batch."""
    lengths = [sizes[axis] for axis in batch_of(sizes)]
    generator = torch.Generator().manual_seed(seed * 17 + len(name) + 1)
    return torch.randn([*lengths, *SHAPES[name]], generator=generator)


def true_gradient(name: str, sizes: Sizes, seed: int) -> Tensor:
    """One process's: the mean over the parts of the batch, or their sum on partial axes."""
    gradient, partial = (
        parts_of_gradient(name, sizes, seed),
        spec_of(name, sizes).get("partial", []),
    )
    for axis in batch_of(sizes):
        gradient = gradient.sum(0) if axis in partial else gradient.mean(0)
    return gradient


def local_gradient(name: str, sizes: Sizes, seed: int, rank: int) -> Tensor:
    """What the rank has after its backward."""
    spec, here = spec_of(name, sizes), coordinates(sizes, rank)
    gradient, partial = parts_of_gradient(name, sizes, seed), spec.get("partial", [])
    for axis in batch_of(sizes):
        if axis in spec.get("done", []):
            gradient = gradient.mean(0)
        elif axis in spec.get("cut", {}):
            gradient = gradient.sum(0)
        else:
            gradient = gradient[here[axis]]
    for axis in (axis for axis in partial if axis not in BATCH):
        holders = [*spec.get("on", {}).get(axis, range(sizes[axis]))]
        gradient = gradient * (3 - 2 * len(holders) if here[axis] == holders[0] else 2)
    return block(gradient, spec, sizes, rank).clone()


def own_parameters(
    sizes: Sizes, seed: int, rank: int, device: Any, names: Sequence[str] = tuple(SHAPES)
) -> dict[str, nn.Parameter]:
    """The rank's parameters, each with the gradient of its own backward."""
    found = {}
    for name in names:
        spec = spec_of(name, sizes)
        if holds(spec, sizes, rank):
            own = block(whole_values(name, seed), spec, sizes, rank).clone()
            found[name] = nn.Parameter(own.to(device))
            found[name].grad = local_gradient(name, sizes, seed, rank).to(device)
    return found


def held(sizes: Sizes, rank: int) -> list[str]:
    return [name for name in SHAPES if holds(spec_of(name, sizes), sizes, rank)]


def plain(sizes: Sizes) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
