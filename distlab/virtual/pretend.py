"""Python's answers about devices on virtual ranks with pretended GPUs (``devices.py``).

Replaced once in the child process: the properties and methods of ``Tensor`` that speak of a device,
and the makers of tensors that ask C++ for a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .devices import COPY_THERE, CPU, GENERATORS, device_of, gpu_of, indexed, put


class Pretended:
    """Tensors, makers and storages. ``read`` is called for each read by the host, ``resize`` for a
    storage that is about to be resized. Both are the calling rank's."""

    def __init__(self, read: Callable[[str], None], resize: Callable[[Any], None]) -> None:
        self.read, self.resize = read, resize
        self._moves()
        self._looks()
        _makers()
        _generators()
        _autocast()
        self._storages()

    def _moves(self) -> None:
        """Tensors go from one device to another, and gradients back."""
        real_to, read = Tensor.to, self.read

        class Move(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, device: torch.device, dtype: Any, more: Any) -> Tensor:
                ctx.of = device_of(x), x.dtype
                out = real_to(x, dtype, **more | {"copy": True})
                put(out, None if device == CPU else device)
                return out

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                return grads[0].to(*ctx.of), None, None, None

        def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if args and isinstance(args[0], Tensor):
                args = (device_of(args[0]), args[0].dtype, *args[1:])
            given = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **given)
            more = {"memory_format": layout} if layout is not None else {}
            more |= {"copy": True} if kwargs.get("copy") else {}
            dtype, here = self.dtype if dtype is None else dtype, device_of(self)
            if device is None or indexed(device) == here:
                return real_to(self, dtype, non_blocking, **more)
            there = indexed(device)
            if CPU in (here, there) and not (non_blocking and here == CPU):
                read("to" if there == CPU else COPY_THERE)
            return Move.apply(self, there, dtype, more)

        def cuda(self: Tensor, device: Any = "cuda", non_blocking: bool = False) -> Tensor:
            return self.to(indexed("cuda" if device is None else device), non_blocking=non_blocking)

        _replace(to=to, cuda=cuda, cpu=lambda tensor, memory_format=None: tensor.to(CPU))

    def _looks(self) -> None:
        """Properties that tell the device, and methods that need the host's memory."""
        real_numpy, real_list, read = Tensor.numpy, Tensor.tolist, self.read

        def numpy(self: Tensor, *, force: bool = False) -> Any:
            if gpu_of(self) is not None:
                if not force:
                    raise TypeError(
                        f"can't convert {device_of(self)} device type tensor to numpy. Use "
                        "Tensor.cpu() to copy the tensor to host memory first."
                    )
                read("numpy")
            return real_numpy(self, force=force)

        def tolist(self: Tensor) -> Any:
            if gpu_of(self) is not None:
                read("tolist")
            return real_list(self)

        def get_device(self: Tensor) -> int:
            gpu = gpu_of(self)
            return -1 if gpu is None else gpu.index

        _replace(
            device=property(device_of),
            is_cuda=property(lambda tensor: gpu_of(tensor) is not None),
            is_cpu=property(lambda tensor: device_of(tensor).type == "cpu"),
            get_device=get_device,
            numpy=numpy,
            tolist=tolist,
            pin_memory=lambda tensor, device=None: tensor,
            is_pinned=lambda tensor, device=None: False,
            record_stream=lambda tensor, stream: None,
        )

    def _storages(self) -> None:
        real, look = torch.UntypedStorage.resize_, self.resize

        def resize_(storage: Any, size: int) -> Any:
            look(storage)
            return real(storage, size)

        torch.UntypedStorage.resize_ = resize_


def _replace(**members: Any) -> None:
    for name, member in members.items():
        setattr(Tensor, name, member)


def _makers() -> None:
    """Functions that ask C++ for a GPU below the operators."""

    def placing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.pop("device", None)
            needs = kwargs.pop("requires_grad", False)
            out = make(data, *args, **kwargs)
            out = out if device is None else out.to(device)
            return out.requires_grad_() if needs else out

        return made

    torch.tensor, torch.as_tensor = placing(torch.tensor), placing(torch.as_tensor)
    torch.asarray = placing(torch.asarray)

    def new_tensor(self: Tensor, data: Any, **more: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device} | more)

    _replace(new_tensor=new_tensor)


def _generators() -> None:
    """Generators of a GPU draw as the CPU's."""
    real: Any = torch.Generator

    class Generator(real):
        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls)
            made.where = indexed(device)
            GENERATORS[made._cdata] = made.where.type
            return made

        def __init__(self, device: Any = "cpu") -> None:
            super().__init__()

        def __del__(self) -> None:
            GENERATORS.pop(self._cdata, None)

        @property
        def device(self) -> torch.device:
            return self.where

    torch.Generator = Generator


def _autocast() -> None:
    """Casts of CUDA are made where the data is: by the CPU's list of operators."""
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def init(self: Any, device_type: str, dtype: Any = None, *more: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        begin(self, device_type, dtype, *more, **named)

    torch.autocast.__init__ = init

    def there(ask: Callable[..., Any], *missing: str) -> Callable[..., Any]:
        @functools.wraps(ask)
        def asked(*given: Any) -> Any:
            return ask(*("cpu" if each == "cuda" else each for each in given or missing))

        return asked

    torch.is_autocast_enabled = there(torch.is_autocast_enabled, "cpu")
    for name in ("get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, there(getattr(torch, name)))
