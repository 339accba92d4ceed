"""Operators as a ``TorchDispatchMode`` sees them: below autograd, one call after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Hooks on saved tensors call it, and not as often in every forward.
NOT_COUNTED = torch.ops.aten.detach.default

RandomStates = list[tuple[int | None, Tensor]]  # of the CPU (None) or of a GPU


class Operation(NamedTuple):
    """A call of an operator, as a policy sees it."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def flops(self) -> int:
        """FLOPs of a product, convolution or attention; 0 for all others."""
        count = flop_registry.get(self.op.overloadpacket)
        return 0 if count is None else int(count(*self.args, **self.kwargs, out_val=self.out))

    @property
    def nbytes(self) -> int:
        """Bytes of the output's tensors."""
        return sum(t.nbytes for t in tree_leaves(self.out) if isinstance(t, Tensor))


Keep = Callable[[Operation], bool]  # a policy


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of ``tensor``, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def written_by(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The storages that ``op`` writes into. Schemas of collectives do not say: all of theirs."""
    hidden = op.namespace == "c10d"
    if not (hidden or op._schema.is_mutable):
        return set()
    passed = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    written = [
        passed.get(a.name)
        for a in op._schema.arguments
        if hidden or (a.alias_info is not None and a.alias_info.is_write)
    ]
    return {storage_of(t) for t in tree_leaves(written) if isinstance(t, Tensor)}


class Mode(TorchDispatchMode):
    """A mode that torch does not compile: it would import its compiler first (1.4 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Saver(torch.autograd.Function):
    """A node that saves tensors as any other one does: it notices that one was changed, and the
    hooks of a segment around it get them."""

    @staticmethod
    def forward(ctx: Any, grad_anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save ``tensors``."""
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Never called: the result of ``forward`` is used nowhere."""
        raise AssertionError("a Saver has no gradient")


class Saved(NamedTuple):
    """Tensors that a node of the graph has saved."""

    end: Tensor  # its output: in torch 2.11 the node goes when it goes

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors. RuntimeError if one of them was changed."""
        node: Any = self.end.grad_fn
        return tuple(node.saved_tensors)


def saved_by(tensors: Iterable[Tensor]) -> Saved:
    """``tensors``, saved by a node of their own."""
    return Saved(Saver.apply(torch.empty(0, requires_grad=True), *tensors))


def detached(tensor: Tensor) -> Tensor:
    """The same values without a graph. It shares the version of ``tensor``, also in a mode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def random_states(tensors: Iterable[Tensor]) -> RandomStates:
    """The random states of the devices that ``tensors`` are on."""
    gpus = {t.get_device() if t.is_cuda else None for t in tensors}
    return [
        (gpu, torch.get_rng_state() if gpu is None else torch.cuda.get_rng_state(gpu))
        for gpu in gpus
    ]


def set_random_states(states: RandomStates) -> None:
    """The reverse."""
    for gpu, state in states:
        if gpu is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, gpu)
