"""What a rank did in a part of its program: kernels, collectives, memory. It can be done again.

The second time costs no operators of torch, but the same virtual time: every kernel, every
collective and every change of memory comes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .internals import Unseen
from .part import Part
from .shards import Shards


class Journal:
    """What a rank does from now on, for as long as its state has this journal.

    ``usable``: all of it can be done again. ``alive``: the bytes of storages that were made and not
    freed, by their keys; ``given``: the key of a storage that comes from outside and may be freed.
    """

    def __init__(self, alive: dict[int, int], given: int | None = None) -> None:
        self.entries: list[tuple[str, Any, Any]] = []
        self.alive, self.given, self.usable = alive, given, True
        self._numbers: dict[int, int] = {}  # by the identity of a part: to keep it keeps tensors
        self._posted = 0

    def spent(self, cost: Any, launched: bool) -> None:
        """A kernel ran, or a part of one that was launched before."""
        self.entries.append(("spend", cost, launched))

    def counted(self, flops: float) -> None:
        """An operator has so many FLOPs."""
        self.entries.append(("count", flops, None))

    def made(self, key: int, nbytes: int) -> None:
        """A storage was made."""
        self.alive[key] = nbytes
        self.entries.append(("memory", nbytes, key))

    def freed(self, key: int, nbytes: int) -> None:
        """A storage was freed."""
        if key == self.given:
            self.entries.append(("drop", None, None))
        elif nbytes:
            self.usable &= self.alive.pop(key, None) == nbytes
            self.entries.append(("memory", -nbytes, key))

    def posted(self, part: Part, channel: Any) -> None:
        """A collective was issued."""
        self.usable &= part.peer is None and part.event is not None
        self._numbers[id(part)] = self._posted
        self._posted += 1
        self.entries.append(("post", _without_values(part), channel))

    def waited(self, part: Part) -> None:
        """The rank has waited for a collective."""
        number = self._numbers.get(id(part))
        self.usable &= number is not None
        self.entries.append(("wait", number, None))

    def outlives(self, tensor: Tensor) -> None:
        """``tensor`` was made here and goes on living: the second time it is made, too."""
        key = tensor.untyped_storage()._cdata
        at = [n for n, (what, _, of) in enumerate(self.entries) if what == "memory" and of == key]
        whole = self.alive.pop(key, None) == tensor.nbytes
        self.usable &= whole and bool(at) and self.entries[at[-1]][1] > 0
        if self.usable:
            self.entries[at[-1]] = "make", (tensor.shape, tensor.stride()), tensor.dtype

    def again(self, world: Any, state: Any, given: Tensor | None = None) -> Tensor | None:
        """Do all of it again on the rank of ``state``; the tensor that outlives it, if one does."""
        model, memory, parts, kept = state.model, state.model.memory, [], None
        for what, one, two in self.entries:
            if what == "spend":
                model.spend(one, two)
            elif what == "memory":
                memory.change(one)
            elif what == "count":
                model.flops += one
            elif what == "post":
                parts.append(_issued_again(world, one, two))
            elif what == "wait":
                world.scheduler.wait(state.rank, parts[one])
                parts[one].acknowledge()
            elif what == "make":
                kept = torch.empty_strided(*one, dtype=two, device="meta")
            elif given is not None:
                memory.forget(given.untyped_storage())
        return kept


def _issued_again(world: Any, before: Part, channel: Any) -> Part:
    fields = before.rank, before.op, before.group, before.gives, before.gets
    part = Part(*fields, reduce_op=before.reduce_op, payload=before.payload)
    world.post(part, channel)
    if part.event is not None and before.event is not None:
        part.event.line = before.event.line
    return part


def _without_values(part: Part) -> Part:
    """The same part of tensors that nobody counts as memory."""
    with Unseen():
        gives, gets, payload = map(_alike, (part.gives, part.gets, part.payload))
    alike = Part(part.rank, part.op, part.group, gives, gets, reduce_op=part.reduce_op)
    alike.payload, alike.event = payload, part.event
    return alike


def _alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(tensors, Shards):
        return Shards(_alike(tensors.wholes), tensors.ranks)
    like = ((t.size(), t.stride(), t.dtype) for t in tensors)
    return [torch.empty_strided(size, stride, dtype=of, device="meta") for size, stride, of in like]
