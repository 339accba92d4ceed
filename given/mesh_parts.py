"""What a mesh is made of: named axes, and the pieces of a checkpoint that any mesh can load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Piece = dict[str, Any]  # "name", "shape" of the whole, "first" element (lists), and "values"


@dataclass(frozen=True)
class Axes:
    """The ``sizes`` of named axes, outermost first, and the axes that divide the ``batch``.

    Ranks that differ on an axis of ``batch`` have samples, or positions, of their own. Raises
    ValueError if a size is less than 1, or if ``batch`` names another axis.
    """

    sizes: Mapping[str, int]
    batch: Sequence[str] = ()

    def __post_init__(self) -> None:
        if min(self.sizes.values(), default=1) < 1:
            raise ValueError(f"all sizes must be at least 1: {dict(self.sizes)}")
        self.expect_axes(self.batch)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def expect_axes(self, axes: Iterable[str]) -> None:
        """Raise ValueError if one of ``axes`` is not in the grid."""
        unknown = sorted({*axes} - self.sizes.keys())
        if unknown:
            raise ValueError(f"no such axes: {unknown}; the grid has {[*self.sizes]}")


class Block(NamedTuple):
    """A rank's part of a parameter of ``shape``; ``bounds``: begin and end on each dimension."""

    values: Tensor
    shape: Sequence[int]
    bounds: Sequence[tuple[int, int]]


def fill(blocks: Mapping[str, Block], pieces: Iterable[Piece]) -> None:
    """Copy the elements of ``blocks``, by name, from ``pieces``, which are read once.

    Raises ValueError, before anything changes, if the pieces lack an element of the blocks, or if
    one of them is of a parameter with another shape.
    """
    fresh = {name: torch.empty_like(block.values) for name, block in blocks.items()}
    come = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in fresh.items()}
    for piece in pieces:
        name = piece["name"]
        if name not in blocks:
            continue
        if [*blocks[name].shape] != piece["shape"]:
            raise ValueError(f"{name}: {piece['shape']} was saved, not {[*blocks[name].shape]}")
        here, there = overlap(blocks[name].bounds, piece)
        fresh[name][here] = piece["values"][there].to(fresh[name].device)
        come[name][here] = True
    lacking = sum(int((~mask).sum()) for mask in come.values())
    if lacking:
        raise ValueError(f"{lacking} elements of this rank's blocks are in none of the pieces")
    for name, block in blocks.items():
        block.values.copy_(fresh[name])


def overlap(
    bounds: Sequence[tuple[int, int]], piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where the elements are that ``bounds`` and ``piece`` share: in the block, in the piece."""
    here, there = [], []
    for (begin, end), first, size in zip(
        bounds, piece["first"], piece["values"].shape, strict=True
    ):
        low = max(begin, first)
        high = max(low, min(end, first + size))
        here.append(slice(low - begin, high - begin))
        there.append(slice(low - first, high - first))
    return tuple(here), tuple(there)
