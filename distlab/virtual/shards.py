"""Tensors cut into one shard for each rank of a group; of thousands of ranks only when needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from .shadows import shadow_of


class Shards(Sequence[Tensor]):
    """The equal shards of flat tensors, one tensor after the other; a shard is made when it is
    asked for."""

    def __init__(self, wholes: Sequence[Tensor], ranks: int) -> None:
        self.wholes, self.ranks = wholes, ranks

    def __len__(self) -> int:
        return len(self.wholes) * self.ranks

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        number, position = divmod(range(len(self))[index], self.ranks)
        size = len(self.wholes[number]) // self.ranks
        return self.wholes[number].narrow(0, position * size, size)

    def __iter__(self) -> Iterator[Tensor]:
        return (shard for whole in self.wholes for shard in whole.chunk(self.ranks))


def cut(wholes: Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """Each of ``wholes`` (flat) in ``count`` parts. Tensors without values move none, so nobody
    may ask for their parts."""
    unknown = all(whole.is_meta and shadow_of(whole) is None for whole in wholes)
    if unknown and not any(len(whole) % count for whole in wholes):
        return Shards(wholes, count)
    return [part for whole in wholes for part in whole.chunk(count)]


def wholes_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of which these are shards, or they themselves."""
    return tensors.wholes if isinstance(tensors, Shards) else tensors
