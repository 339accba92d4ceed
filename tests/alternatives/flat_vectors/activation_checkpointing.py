# for: 2.7
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Slot:
    index: int


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value


def take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    return rebuild(value, lambda item: take_out(item, tensors))


def put_in(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    return rebuild(value, lambda item: put_in(item, tensors))


class Surroundings:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.generators = [torch.default_generator]
        for device in dict.fromkeys(t.device for t in tensors if t.is_cuda):
            self.generators.append(torch.cuda.default_generators[device.index])
        self.states = [g.get_state() for g in self.generators]
        self.modes = {}
        for kind in ["cpu", *(t.device.type for t in tensors)]:
            if kind not in self.modes and torch.amp.is_autocast_available(kind):
                self.modes[kind] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextmanager
    def casting(self) -> Iterator[None]:
        contexts = [
            torch.autocast(device_type=kind, enabled=on, dtype=dtype, cache_enabled=False)
            for kind, (on, dtype) in self.modes.items()
        ]
        with ExitStack() as entered:
            for context in contexts:
                entered.enter_context(context)
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        outside = [g.get_state() for g in self.generators]
        try:
            for g, state in zip(self.generators, self.states, strict=True):
                g.set_state(state)
            with self.casting():
                yield
        finally:
            for g, state in zip(self.generators, outside, strict=True):
                g.set_state(state)


@dataclass
class Call:
    fn: Callable[..., Any]
    inputs: Any
    surroundings: Surroundings
    outputs: Any = None

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = put_in(self.inputs, tensors)
        found: list[Tensor] = []
        self.outputs = take_out(self.fn(*args, **kwargs), found)
        return tuple(found)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, grad_anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        with call.surroundings.casting(), torch.no_grad():
            found = call.run(tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return tuple(t.detach() for t in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("checkpoint: gradients of chosen tensors only are not supported")
        call = ctx.call
        copies = []
        for needed, t in zip(ctx.needs_input_grad[2:], ctx.saved_tensors, strict=True):
            copy = t.detach()
            copy.requires_grad = needed
            copies.append(copy)
        with torch.enable_grad():
            with call.surroundings.restored():
                again = call.run(copies)
            pairs = [
                (y, g)
                for y, g in zip(again, grads, strict=True)
                if y.requires_grad and g is not None
            ]
        if len(pairs) > 0:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        return (None, None, *[copy.grad if copy.requires_grad else None for copy in copies])


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        tensors: list[Tensor] = []
        nested = take_out((args, kwargs), tensors)
        call = Call(fn, nested, Surroundings(tensors))
        results = Recompute.apply(call, torch.zeros(0).requires_grad_(), *tensors)
        return put_in(call.outputs, results)
    return fn(*args, **kwargs)


def checkpoint_sequential(
    layers: Sequence[Callable[[Tensor], Tensor]], segments: int, x: Tensor
) -> Tensor:
    if segments < 1 or segments > len(layers):
        raise ValueError(f"1 to {len(layers)} segments are possible, not {segments}")

    def runs(first: int, end: int) -> Callable[[Tensor], Tensor]:

        def run(x: Tensor) -> Tensor:
            for i in range(first, end):
                x = layers[i](x)
            return x

        return run

    first = 0
    for left in range(segments, 1, -1):
        end = first - (first - len(layers)) // left
        x = checkpoint(runs(first, end), x)
        first = end
    return runs(first, len(layers))(x)
