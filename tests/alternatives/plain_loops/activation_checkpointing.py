# for: 2.7
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
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
        self.cpu_state = torch.get_rng_state()
        self.cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
        self.cuda_states = [torch.cuda.get_rng_state(index) for index in self.cuda]
        types = dict.fromkeys(["cpu", *(t.device.type for t in tensors)])
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def casting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.cuda), self.casting():
            torch.set_rng_state(self.cpu_state)
            for index, state in zip(self.cuda, self.cuda_states, strict=True):
                torch.cuda.set_rng_state(state, index)
            yield


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
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            outputs = call.run(tensors)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("only for all leaves, by backward()")
        tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        with ctx.call.surroundings.restored(), torch.enable_grad():
            outputs = ctx.call.run(inputs)
        ends, seeds = ([], [])
        for output, grad in zip(outputs, grads, strict=True):
            if grad is not None and output.requires_grad:
                ends.append(output)
                seeds.append(grad)
        if ends:
            torch.autograd.backward(ends, seeds)
        return (None, None, *(t.grad for t in inputs))


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    tensors: list[Tensor] = []
    inputs = take_out((args, kwargs), tensors)
    call = Call(fn, inputs, Surroundings(tensors))
    anchor = torch.empty(0, requires_grad=True)
    outputs = Recompute.apply(call, anchor, *tensors)
    return put_in(call.outputs, outputs)


def _chain(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def checkpoint_sequential(
    layers: Sequence[Callable[[Tensor], Tensor]], segments: int, x: Tensor
) -> Tensor:
    count = len(layers)
    if not 1 <= segments <= count:
        raise ValueError(f"{count} layers can't be divided into {segments} segments")
    short, longer = divmod(count, segments)
    ends = list(accumulate([short + 1] * longer + [short] * (segments - longer)))
    begin = 0
    for end in ends[:-1]:
        x = checkpoint(_chain, tuple(layers[begin:end]), x)
        begin = end
    return _chain(tuple(layers[begin:]), x)
