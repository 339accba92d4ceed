"""Activation checkpointing: keep the inputs of a segment, compute the rest again in backward.

Backward needs the activations of forward, and it needs those of the last layer first. So the
activations of all n layers are kept until their turn comes. A checkpointed segment keeps its inputs
alone. When backward arrives, the segment runs forward once more and records a graph, and backward
goes through that graph.

Let a layer's input have A bytes, and let autograd save L bytes per layer, L ≥ A. (A transformer
block in 16 bits saves about 17A, and its attention scores.) Take n layers in s segments. The last
segment need not be checkpointed, because its backward comes at once:

    held after forward        (s-1)·A + ⌊n/s⌋·L         without: n·L
    peak in backward, about   (s-1)·A + ⌈n/s⌉·L
    layers computed           2n - ⌊n/s⌋                without: n

Without rounding the sum is least at s = √(n·L/A), or at s = n if that is less. To find the best s,
compare the numbers of segments that divide n. s = √n already reduces n·L to O(√n)·L. Backward costs
about two forwards, so a step takes at most 4/3 of the time. Checkpointing communicates nothing of
its own. A collective inside a segment is issued again by every rank, in backward.

Invariant: outputs, gradients, and the random state that the program sees afterwards are the same,
to the last bit, as without checkpointing. The second forward therefore runs in the surroundings of
the first: with the same random numbers (dropout) and the same autocast.
Sources: Griewank & Walther 2000 (Algorithm 799) for the trade. Chen et al. 2016 (arXiv 1604.06174),
section 4, for √n. Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1, for L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


# -- tensors in nested values ---------------------------------------------------------------------
@dataclass(frozen=True)
class Slot:
    """Stands for tensor number ``index`` in a nested value that the tensors were taken out of."""

    index: int


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple (also a named one), list or dict with ``change`` applied to its items."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value


def take_out(value: Any, tensors: list[Tensor]) -> Any:
    """Append all tensors in ``value``, however nested, to ``tensors``; Slots stand in for them."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    return rebuild(value, lambda item: take_out(item, tensors))


def put_in(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The reverse: ``tensors`` in the place of the Slots."""
    if isinstance(value, Slot):
        return tensors[value.index]
    return rebuild(value, lambda item: put_in(item, tensors))


# -- one segment ----------------------------------------------------------------------------------
class Surroundings:
    """Random state and autocast at the time of construction, and the way back to them.

    The random state is that of the CPU (5 kB) and of the CUDA devices on which ``tensors`` are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Note the random state and, for the CPU and the tensors' devices, autocast."""
        # --- exercise 2.7: start
        # Step 1: the states of the random generators
        # Step 2: for each type of device: is autocast on, and in which dtype
        self.cuda = sorted({t.get_device() for t in tensors if t.is_cuda})
        self.cpu_state = torch.get_rng_state()
        self.cuda_states = [torch.cuda.get_rng_state(device) for device in self.cuda]
        types = sorted({"cpu", *(t.device.type for t in tensors)})
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        ]
        # --- exercise 2.7: end

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast as noted, without its cache: a weight that was cast while no graph was recorded
        has no gradient, and the second forward must not get it."""
        # --- exercise 2.7: start
        # Step 3: enter one torch.autocast per type of device, also where autocast must be off
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                stack.enter_context(cast)
            yield
        # --- exercise 2.7: end

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Random state and autocast as noted; afterwards the outer ones are back, also after an
        error."""
        # --- exercise 2.7: start
        # Step 4: at its end torch.random.fork_rng puts back the outer random state
        with torch.random.fork_rng(devices=self.cuda), self.casting():
            torch.set_rng_state(self.cpu_state)
            for device, state in zip(self.cuda, self.cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
        # --- exercise 2.7: end


@dataclass
class Call:
    """One call of ``fn``: its nested (args, kwargs) and, once it ran, outputs, without tensors."""

    fn: Callable[..., Any]
    inputs: Any
    surroundings: Surroundings
    outputs: Any = None

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``fn`` with ``tensors`` in its arguments and return the tensors in its result."""
        args, kwargs = put_in(self.inputs, tensors)
        found: list[Tensor] = []
        self.outputs = take_out(self.fn(*args, **kwargs), found)
        return tuple(found)


class Recompute(torch.autograd.Function):
    """A node of the graph that stands for a whole segment."""

    @staticmethod
    def forward(ctx: Any, call: Call, grad_anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run ``call`` without recording a graph; only ``tensors`` are saved."""
        # --- exercise 2.7: start
        # Step 5: save the tensors by save_for_backward: it notices if they change in the meantime
        # Step 6: autograd records nothing inside a Function's forward. It makes the tensors that
        #         you return outputs of this node. So return new tensors: fn may return a buffer or
        #         a parameter, which must not become an output
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            return tuple(output.detach() for output in call.run(tensors))
        # --- exercise 2.7: end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the call again, now recording, and go backward through it.

        Parameters that ``fn`` uses get their gradients at once; those of the inputs are returned.
        """
        # --- exercise 2.7: start
        # Step 7: refuse a backward for chosen inputs: parameters are not inputs of this node, so
        #         autograd can't choose among their gradients
        # Step 8: detach the inputs: backward inside must end at them
        # Step 9: the second forward, in the surroundings of the first
        # Step 10: backward from the outputs that have a gradient and need one
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpointed segment needs backward() without inputs=…")
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with ctx.call.surroundings.restored(), torch.enable_grad():
            outputs = ctx.call.run(inputs)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(t.grad for t in inputs)
        # --- exercise 2.7: end


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, keeping only the tensors among its arguments for backward.

    Arguments and results of ``fn`` may be nested tuples (also named ones), lists and dicts. They
    may hold tensors of any dtype and layout, and other values. ``fn`` may return an argument, a
    buffer or a parameter itself, which stays what it is. ``fn`` runs once now, and once more at
    every backward. It then has the same autocast state and the same random numbers of PyTorch:
    those of the CPU and of the CUDA devices of its arguments. The program's own random state and
    its autocast are what they would be without checkpointing, also after an error in ``fn``.

    Outputs and all gradients equal those of the plain call. Gradients go to the arguments that need
    one, and to everything else that ``fn`` uses (parameters, also when no argument needs one).
    Frozen parameters, and arguments that need no gradient, get none. An output that ``fn`` has
    detached may need a gradient here; a gradient that arrives there goes no further. Without grad
    mode it is the plain call.

    ``fn`` must compute the same twice and not change its arguments. A tensor argument may change
    between forward and backward, or a program may ask for gradients by ``torch.autograd.grad``.
    Then it raises RuntimeError or gives right results; it is never silently wrong. Keeps no
    activation and no output.
    """
    # --- exercise 2.7: start
    # Step 11: without grad mode there is nothing to keep
    # Step 12: autograd sees a tensor only if it is itself an argument of apply
    # Step 13: parameters may need a gradient though no argument does. An empty tensor that needs
    #          one makes autograd come back to this node
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    tensors: list[Tensor] = []
    inputs = take_out((args, kwargs), tensors)
    call = Call(fn, inputs, Surroundings(tensors))
    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)
    return put_in(call.outputs, outputs)
    # --- exercise 2.7: end


# -- many segments --------------------------------------------------------------------------------
def checkpoint_sequential(
    layers: Sequence[Callable[[Tensor], Tensor]], segments: int, x: Tensor
) -> Tensor:
    """All ``layers`` one after the other on ``x``, in ``segments`` segments, all but the last one
    checkpointed.

    Segments are runs of ⌈n/s⌉ layers first, then of ⌊n/s⌋. Equals the plain calls. After forward it
    holds as many bytes as the module's formula says, and the peak of backward is the module's, too.
    A layer of a checkpointed segment is computed twice, a layer of the last segment once. Raises
    ValueError unless 1 ≤ ``segments`` ≤ number of layers, before any layer runs.
    """
    # --- exercise 2.7: start
    # Step 14: the lengths of the segments, longer ones first, and where each of them ends
    # Step 15: don't checkpoint the last segment: its backward comes at once, so its activations
    #          would be freed only to be computed again
    if not 1 <= segments <= len(layers):
        raise ValueError(f"can't cut {len(layers)} layers into {segments} segments")
    short, longer = divmod(len(layers), segments)
    ends = list(accumulate(short + (k < longer) for k in range(segments)))

    def run(segment: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        for layer in segment:
            x = layer(x)
        return x

    for start, end in zip([0, *ends], ends[:-1], strict=False):
        x = checkpoint(run, layers[start:end], x)
    return run(layers[len(layers) - short :], x)
    # --- exercise 2.7: end
