"""What a tensor holds while it is reduced: looked at whenever a virtual rank communicates.

Rank r brings 2^r in every element. So the bits of a sum tell whose numbers are in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.virtual.group import VirtualGroup
from distlab.virtual.part import Part

Look = list[list[int]]


def brought(rank: int, numel: int) -> Tensor:
    """The tensor that a rank brings."""
    return torch.full((numel,), 1 << rank)


def parts_in(pieces: Sequence[Tensor]) -> list[int]:
    """Whose numbers each piece holds, as bits; every element of a piece must hold the same."""
    found = []
    for piece in pieces:
        first = int(piece.reshape(-1)[0])
        assert bool((piece == first).all()), "the elements of a piece hold different sums"
        found.append(first)
    return found


@contextlib.contextmanager
def looked_at(tensor: Tensor, count: int) -> Iterator[list[Look]]:
    """Look at ``tensor``, in ``count`` equal pieces, at each communication of this virtual rank.

    A look has three lists: the numbers of the pieces that the rank gives away (none if it gives
    something else), whose parts are in each tensor that it gives, and in each piece of ``tensor``.
    """
    looks: list[Look] = []
    pieces = list(tensor.view(count, -1))

    def note(part: Part) -> None:
        given = [number for each in part.gives for number in _numbers(each, pieces)]
        looks.append([given, parts_in(part.gives), parts_in(pieces)])

    with _told(note):
        yield looks


def _numbers(given: Tensor, pieces: Sequence[Tensor]) -> list[int]:
    """Which pieces a tensor is a view of."""
    if given.untyped_storage().data_ptr() != pieces[0].untyped_storage().data_ptr():
        return []
    size = pieces[0].numel()
    first = given.storage_offset() // size
    return [*range(first, first + given.numel() // size)]


_told_by: dict[int, Callable[[Part], None]] = {}  # thread of a virtual rank: whom it tells
_issue = VirtualGroup._issue


def _issue_and_tell(group: VirtualGroup, part: Part, outputs: Sequence[Tensor]) -> Any:
    note = _told_by.get(threading.get_ident())
    if note is not None:
        note(part)
    return _issue(group, part, outputs)


@contextlib.contextmanager
def _told(note: Callable[[Part], None]) -> Iterator[None]:
    """Tell ``note`` what this thread's rank communicates, in a process of virtual ranks."""
    VirtualGroup._issue = _issue_and_tell  # type: ignore
    _told_by[threading.get_ident()] = note
    try:
        yield
    finally:
        del _told_by[threading.get_ident()]
