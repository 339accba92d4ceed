"""Parts of attention: which queries meet which keys, and in which dtype they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch import Tensor

Part: TypeAlias = tuple[slice, slice, bool]  # queries, keys, whether the mask is needed

TILE = 128  # queries


def tiles(parts: Iterable[Part]) -> Iterator[Part]:
    """The same parts, of at most ``TILE`` queries each: so many scores stay in a processor's cache.

    In a part with a mask, the last query sees all keys, and each query before it one key less. Keys
    that no query of a tile sees are left out.
    """
    for ours, theirs, masked in parts:
        for begin in range(ours.start, ours.stop, TILE):
            end = min(begin + TILE, ours.stop)
            unseen = ours.stop - end if masked else 0
            yield slice(begin, end), slice(theirs.start, theirs.stop - unseen), masked


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype of the accumulators: float32 for 16-bit numbers, else their own."""
    return [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
