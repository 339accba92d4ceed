"""The memory of a rank: model state by kind, saved activations, and the peak of all tensors.

A model of Ψ parameters, trained with Adam in mixed precision, has a state of 16Ψ bytes. Weights and
gradients in 16 bits take 2Ψ each, the optimizer (fp32 weights, two moments) takes 12Ψ. Sharding
divides parts of that by the number of ranks. The checks compare the bytes measured here with the
formula. Storage is counted once, whichever tensors share it. Source: Rajbhandari et al. 2020 (ZeRO,
arXiv 1910.02054), section 3.1.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .failure import CheckFailed
from .log import readable
from .operators import tensors_in


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class Held:
    """Bytes of a rank's model state by kind."""

    parameters: int
    gradients: int
    buffers: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.buffers + self.optimizer

    def at_most(self, rank: int, formula: str = "", **limits: int) -> None:
        """Fail if a kind (or ``total``) holds more bytes than its limit."""
        for kind, limit in limits.items():
            held = getattr(self, kind)
            if held > limit:
                by = f" = {formula}" if formula else ""
                raise CheckFailed(
                    f"rank {rank} holds {readable(held)} of {kind}, "
                    f"expected at most {readable(limit)}{by}",
                    cause="too-much-memory",
                    rank=rank,
                )


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """The bytes that ``model`` and ``optimizer`` hold on this rank now; tied tensors count once."""
    state = optimizer.state.values() if optimizer else ()
    return Held(
        parameters=storage_bytes(model.parameters()),
        gradients=storage_bytes(p.grad for p in model.parameters()),
        buffers=storage_bytes(model.buffers()),
        optimizer=storage_bytes(t for entry in state for t in tensors_in(list(entry.values()))),
    )


class SavedActivations:
    """Count the bytes that autograd saves for backward inside the context.

    ``bytes``: distinct storages saved, without those of ``model``'s parameters, which are there
    anyway.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.sizes: dict[int, int] = {}
        parameters = model.parameters() if model else ()
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(self.sizes.values())

    def __enter__(self) -> SavedActivations:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hooks.__exit__(*exc)


class Follower(Protocol):
    """Somebody who is told of each storage that is made or freed, by its key."""

    def made(self, key: int, nbytes: int) -> None:
        """A storage was made."""

    def freed(self, key: int, nbytes: int) -> None:
        """A storage was freed."""


class PeakMemory(TorchDispatchMode):
    """Follow the bytes of all storages that operators make inside the context.

    ``current`` are the bytes alive now, ``peak`` the most that were alive. A storage that existed
    before is not counted, unless ``storage.resize_`` makes it larger. CPU and CUDA tensors count
    alike; the caching of allocators does not show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.alive: dict[int, int] = {}
        self.follower: Follower | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Ledger

    def __enter__(self) -> PeakMemory:
        following().append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        following().remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # its wrapper claims the whole tensor
        return self.watch(func, args, kwargs or {})

    def watch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an operator and count the storages that it makes (also those of meta tensors)."""
        before = {s._cdata for s in _storages((args, tuple(kwargs.values())))}
        out = func(*args, **kwargs)
        self.note(out, before)
        return out

    def note(self, out: Any, before: Collection[int] = ()) -> None:
        """Count the storages of ``out`` that are new: not in ``before`` and not counted yet."""
        for storage in _storages((out,)):
            key, nbytes = storage._cdata, storage.nbytes()
            if nbytes and key not in before and key not in self.alive:
                self._made(storage, nbytes)
        self.peak = max(self.peak, self.current)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage again that had ``before`` bytes and was resized."""
        nbytes = storage.nbytes()
        if storage._cdata in self.alive:
            self.current += nbytes - self.alive[storage._cdata]
            self.alive[storage._cdata] = nbytes
        elif nbytes > before:
            self._made(storage, nbytes)
        self.peak = max(self.peak, self.current)

    def change(self, nbytes: int) -> None:
        """Count bytes of storages that nobody makes."""
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as freed."""
        self._freed(storage._cdata)

    def _made(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.alive[storage._cdata] = nbytes
        self.current += nbytes
        if self.follower is not None:
            self.follower.made(storage._cdata, nbytes)
        weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        nbytes = self.alive.pop(key, 0)
        self.current -= nbytes
        if self.follower is not None and nbytes:
            self.follower.freed(key, nbytes)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(values):
        if tensor.layout == torch.strided:
            yield tensor.untyped_storage()


_local = threading.local()
_resize = torch.UntypedStorage.resize_


def following() -> list[PeakMemory]:
    """The followers of this thread's memory. A resized storage needs them: no
    mode sees ``resize_``."""
    if torch.UntypedStorage.resize_ is _resize:
        torch.UntypedStorage.resize_ = _resize_and_tell
    if not hasattr(_local, "memories"):
        _local.memories = []
    found: list[PeakMemory] = _local.memories
    return found


def _resize_and_tell(storage: torch.UntypedStorage, nbytes: int) -> Any:
    before = storage.nbytes()
    out = _resize(storage, nbytes)
    for memory in following():
        memory.resized(storage, before)
    return out
