"""Pretended GPUs: tensors of virtual ranks report ``cuda:r`` while their data is on the CPU.

Which GPU a tensor is on is an attribute of its storage: views, detached tensors and what autograd
saves share it. ``DeviceModel`` sees every operator, in forward and backward, and marks each new
tensor: with the device that is asked for, else with that of its inputs. It refuses what CUDA
refuses: inputs on two devices, a generator of another device. ``pretend`` lets Python's ``device``,
``is_cuda`` and ``to`` speak of the mark (the C++ side goes on to see the CPU, so no driver is
needed).

Three other ways were tried and fail. A wrapper subclass made with ``device="cuda:1"`` aborts in C++
at its first product where there is no driver. A subclass of a CPU tensor is lost in backward,
because gradients are plain tensors. Meta tensors with shadows have no data where storage is
resized.

Limits: kernels are the CPU's, so rounding and fusion are the CPU's, too. Random numbers of a GPU
are drawn from the rank's CPU generator. Code in C++ that makes tensors and sends them
(DistributedDataParallel's buckets, functional collectives) gets unmarked ones, which are refused.
``torch.autocast`` of CUDA casts as the CPU's does. There is one stream; pinned memory, graphs and
NVML are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .flight import Flight

COPY_THERE = "a copy to the GPU"  # the host waits for these without a look at any value
CPU = torch.device("cpu")
# operators that take a tensor of the CPU beside those of a GPU
MIXES = {"copy_", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
MIXES |= {"index_fill_"}  # C++ takes it on the CPU for x[index] = number
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "_unique2"}
MOVES = {"copy_"}  # the host waits if data go from one kind of device to the other
KEPT = {"lift_fresh", "alias", "detach", "_unsafe_view"}
GENERATORS: dict[int, str] = {}  # address of a generator: "cuda" if it is one of a GPU
MADE = object()  # the mark of a tensor that C++ made for another one: it goes to that one's device


def mark_of(tensor: Tensor) -> Any:
    """The GPU of a tensor; None if it is in the host's memory, MADE if C++ made it."""
    return None if tensor.is_sparse else getattr(tensor.untyped_storage(), "gpu", None)


def gpu_of(tensor: Tensor) -> torch.device | None:
    """The GPU of a tensor; None if it is in the host's memory."""
    mark = mark_of(tensor)
    return None if mark is MADE else mark


def put(tensor: Tensor, gpu: torch.device | None) -> None:
    """Say where a tensor's storage is."""
    tensor.untyped_storage().gpu = gpu


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor is for the program."""
    return gpu_of(tensor) or _real_device(tensor)


def indexed(device: Any) -> torch.device:
    """``device`` with an index: the rank's current GPU where it has none."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


_real_device: Callable[[Tensor], torch.device] = torch._C.TensorBase.device.__get__


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


@dataclass(frozen=True, slots=True)
class Kind:
    """Facts about an operator. ``view``: it touches no data. ``shaped``: it needs only shapes.
    ``changes``: the positions and names of arguments that it writes to."""

    name: str
    view: bool
    shaped: bool
    changes: frozenset[int | str]
    mixes: bool
    reads: bool
    moves: bool

    @classmethod
    def of(cls, func: Any) -> Kind:
        """Of one overload, from its schema."""
        name = func._schema.name.split("::")[1]
        arguments = list(enumerate(func._schema.arguments))
        written = [(n, a.name) for n, a in arguments if a.alias_info and a.alias_info.is_write]
        return cls(
            name,
            func.is_view or name in KEPT,
            name.startswith("new_") or name.endswith("_like"),
            frozenset(key for pair in written for key in pair),
            name in MIXES,
            name in READS,
            name in MOVES,
        )


class DeviceModel(TorchDispatchMode):
    """Follows on one rank which tensor is on which device, and which operators touch memory in
    flight.

    ``read`` is called for each operator in which the host waits for a GPU: the operator looks at
    values, or copies some there (``aten/src/ATen/native/cuda/Copy.cu``, ``memcpy_and_sync``).
    """

    kinds: ClassVar[dict[Any, Kind]] = {}

    def __init__(self, flight: Flight, read: Callable[[str], None]) -> None:
        super().__init__()
        self.flight, self.read = flight, read

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self.kinds.get(func)
        if kind is None:
            kind = self.kinds[func] = Kind.of(func)
        if kind.view:
            return func(*args, **kwargs)
        given = [*tensors_of(args), *tensors_of(kwargs.values())]
        if self.flight.works and not kind.shaped:
            self._look(kind, args, kwargs)
        mark = target = _common(kind, given)
        if kwargs.get("device") is not None:
            kwargs, target = _on_the_host(kwargs, mark if given else MADE)
        elif kind.changes and isinstance(args[0], Tensor):
            target = mark_of(args[0])
            _refuse_generator(kwargs, device_of(args[0]))
        if isinstance(mark, torch.device) and (kind.reads or (kind.moves and _waits(*args))):
            self.read(kind.name)
        out = func(*args, **kwargs)
        if target is not None and not kind.changes:
            for tensor in tensors_of((out,)):
                put(tensor, target)
        return out

    def _look(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """Refuse an operator that touches memory in flight."""
        for key, value in (*enumerate(args), *kwargs.items()):
            for tensor in tensors_of((value,)):
                self.flight.touch(tensor, key in kind.changes)


def _waits(to: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    """Whether the host waits in ``copy_``. A number is no tensor: C++ makes one of ``x[0] = 1``."""
    if mark_of(to) is None:
        return True
    return mark_of(source) is None and source.dim() > 0 and not non_blocking


def _common(kind: Kind, given: list[Tensor]) -> Any:
    """The mark of a tensor made of these inputs.

    Raises RuntimeError if they are on several devices; numbers of the host go with all.
    """
    found: Any = None
    host = made = False
    for tensor in given:
        mark = mark_of(tensor)
        if mark is MADE:
            made = True
        elif mark is None:
            host = host or tensor.dim() > 0
        elif found is None or kind.mixes:
            found = mark
        elif found != mark:
            raise _two_devices(found, mark)
    if found is None:
        return None if host or not made else MADE
    if host and not kind.mixes:
        raise _two_devices(found, CPU)
    return found


def _on_the_host(kwargs: dict[str, Any], mark: Any) -> tuple[dict[str, Any], Any]:
    """The arguments for the CPU, and the mark for the requested device.

    A tensor that Python makes is asked for with ``pin_memory``. One that C++ makes is on the CPU by
    the options of another tensor, and gets its ``mark``.
    """
    asked = indexed(kwargs["device"])
    _refuse_generator(kwargs, asked)
    by_hand = "pin_memory" in kwargs
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if asked.type == "cuda":
        return kwargs | {"device": CPU}, asked
    return kwargs, None if by_hand else mark


def _two_devices(one: torch.device, other: torch.device) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}!"
    )


def _refuse_generator(kwargs: dict[str, Any], device: torch.device) -> None:
    """Raises RuntimeError if numbers are drawn by a generator of another kind of device."""
    generator = kwargs.get("generator")
    if generator is not None and GENERATORS.get(generator._cdata, "cpu") != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found "
            f"'{GENERATORS.get(generator._cdata, 'cpu')}'"
        )
