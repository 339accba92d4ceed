"""Memory in flight on one rank: received data are unknown yet, and sent data must stay.

From the issue of an operation until its handle was waited for, no code may touch the memory that it
writes, nor write the memory that it reads. On a GPU nothing orders the stream of such code with the
communication. Until then arriving data are poisoned (NaN, or the largest value of an integer), for
readers that no operator shows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..observe.failure import CheckFailed
from ..observe.lines import learner_line, source_line
from .internals import Unseen
from .part import Part


def written(part: Part) -> Sequence[Tensor]:
    """The tensors that the operation writes on its rank."""
    is_root = part.peer == part.rank.index
    if (part.op == "broadcast" and is_root) or (part.op == "reduce" and not is_root):
        return ()
    if part.op == "all_gather":  # in place, the own part is there already
        given = {tensor.data_ptr() for tensor in part.gives}
        return [tensor for tensor in part.gets if tensor.data_ptr() not in given]
    return part.gets


class Flight:
    """The operations under way on one rank; ``works``: its handles that were not waited for."""

    def __init__(self, rank: int, works: dict[int, Any], learner_files: Collection[str]) -> None:
        self.rank, self.works, self.learner_files = rank, works, learner_files

    def touch(self, tensor: Tensor, changes: bool) -> None:
        """An operator reads or writes ``tensor``. Raises CheckFailed if that is in flight."""
        for part in self._parts():
            if any(_meet(tensor, other) for other in written(part)):
                self._refuse("writes to" if changes else "reads", part, changes)
            if changes and any(_meet(tensor, other) for other in part.gives):
                self._refuse("writes to", part, True)

    def resize(self, storage: Any) -> None:
        """A storage gets another size. Raises CheckFailed if something in it is in flight."""
        for part in self._parts():
            for tensor in (*part.gives, *part.gets):
                if tensor.untyped_storage().data_ptr() == storage.data_ptr():
                    self._refuse("resizes", part, True)

    def _parts(self) -> list[Part]:
        parts = (work.part for work in self.works.values())
        return [part for part in parts if part.entry is not None]

    def _refuse(self, does: str, part: Part, changes: bool) -> None:
        line = source_line(learner_line(sys._getframe(2), self.learner_files))
        raise CheckFailed(
            f"rank {self.rank} {does} the buffer of its {part.describe()} while it is in flight: "
            "on a GPU nothing orders this line with the communication before its handle was "
            "waited for. gloo forgives it only where the values are the same before and after",
            cause="overwritten-in-flight" if changes else "read-in-flight",
            rank=self.rank,
            line=line,
        )


def poison(part: Part) -> None:
    """Fill receive buffers with values that nobody takes for right ones."""
    gives = [] if part.op == "broadcast" else part.gives
    for tensor in written(part):
        if part.op in ("all_reduce", "reduce") or any(_meet(tensor, other) for other in gives):
            continue  # it holds what is given
        _fill(tensor)


def hold(part: Part) -> None:
    """The operation is complete, and nobody has waited: keep the arrived data aside."""
    with Unseen():
        part.arrived = [(tensor, tensor.detach().clone()) for tensor in written(part)]
    for tensor, _ in part.arrived:
        _fill(tensor)


def _fill(tensor: Tensor) -> None:
    dtype = tensor.dtype
    if dtype is torch.bool:
        value: Any = True
    elif dtype.is_floating_point or dtype.is_complex:
        value = torch.nan
    else:
        value = torch.iinfo(dtype).max
    with Unseen():
        tensor.data.fill_(value)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a byte in common."""
    first, last = _extent(one)
    begin, end = _extent(other)
    if first >= end or begin >= last:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    with Unseen():
        marks = torch.zeros(max(last, end) - min(first, begin), dtype=torch.bool)
        for tensor, start in ((one, first), (other, begin)):
            size = tensor.element_size()
            at = (start - min(first, begin),)
            strides = [*(stride * size for stride in tensor.stride()), 1]
            bytes_of = marks.as_strided([*tensor.shape, size], strides, *at)
            if tensor is other:
                return bool(bytes_of.any())
            bytes_of.fill_(True)
    return True


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last."""
    if not tensor.numel():
        return 0, 0
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in spans)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
