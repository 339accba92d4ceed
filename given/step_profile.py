"""The needs of one training step of a model, moment by moment, measured at no such cost.

A step on fake tensors has shapes and lifetimes, no data and no arithmetic. From such a profile
exercise 3.21 (``sharding_strategies``) estimates what each strategy needs. Cost: about the Python
time of one step, no memory, no communication.

Source: PyTorch's documentation of ``FakeTensorMode`` ("Fake tensor") and of ``TorchDispatchMode``.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Batch = tuple[Any, Tensor]  # inputs and targets of one rank
Loss = Callable[[Any, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Phase:
    """A part of the step: forward of ``unit``, or backward from it to the next unit.

    ``activations``: the most bytes alive at once beside parameters, buffers and complete gradients.
    ``of_root``: bytes of the root's gradients that were complete when it began.
    """

    unit: int
    backward: bool
    activations: int
    of_root: int


@dataclass(frozen=True)
class Profile:
    """The needs of a step on one process, in bytes. Unit 0, the root, has all that is in no other.

    ``parameters``, ``gradients``: of each unit (frozen ones have no gradient). ``largest``: of each
    unit the largest gradient. ``state``: the optimizer's bytes per byte of trainable parameters.
    ``saved``: the bytes that forward keeps for backward. ``phases``: in the order of the step.
    """

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    largest: tuple[int, ...]
    buffers: int
    state: float
    saved: int
    phases: tuple[Phase, ...]


class AliveBytes(TorchDispatchMode):
    """Follow the bytes of the storages that operators make: ``current`` ones and their ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in given and key not in self.known:
                self.known[key] = nbytes
                self.current += nbytes
                weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.current)
        return out

    def _gone(self, key: int) -> None:
        self.current -= self.known.pop(key, 0)


def stand_in(tensor: Tensor) -> Tensor:
    """An empty tensor like ``tensor``; one on meta might be anywhere, so it goes to the CPU."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes_of(tensors: Any) -> int:
    """Bytes of distinct tensors."""
    return sum(t.nbytes for t in dict.fromkeys(tensors))


def profile(
    model: nn.Module,
    batch: Batch,
    make_optimizer: MakeOptimizer,
    *,
    loss: Loss = nn.functional.cross_entropy,
    units: Sequence[nn.Module] = (),
) -> Profile:
    """One step of ``loss(model(inputs), targets)`` on fake tensors; ``model`` is not changed.

    ``units``: as for FSDP, submodules in the order in which they run. It takes neither memory nor
    arithmetic, and no communication. Do it before wrapping; ``model`` and ``batch`` may be on meta.
    Raises ValueError for a model without trainable parameters.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter: there is nothing to shard")
    owner = {p: k for k, unit in enumerate(units, 1) for p in unit.parameters()}
    sizes = [[0] * (len(units) + 1) for _ in range(3)]
    parameters, gradients, largest = sizes
    for p in model.parameters():
        unit, gradient = owner.get(p, 0), p.nbytes * p.requires_grad
        parameters[unit] += p.nbytes
        gradients[unit] += gradient
        largest[unit] = max(largest[unit], gradient)
    saved, phases = run_fake(model, batch, loss, list(units))
    return Profile(
        tuple(parameters),
        tuple(gradients),
        tuple(largest),
        nbytes_of(model.buffers()),
        state_ratio(make_optimizer, trainable[0].dtype),
        saved,
        phases,
    )


def run_fake(
    model: nn.Module, batch: Batch, loss: Loss, units: list[nn.Module]
) -> tuple[int, tuple[Phase, ...]]:
    """(bytes saved for backward, phases) of one forward and backward of a fake copy."""
    phases: list[Phase] = []
    alive = AliveBytes()
    now, of_root = (0, False), 0

    def enter(unit: int, backward: bool) -> None:
        nonlocal now
        phases.append(Phase(*now, alive.peak, of_root))
        now, alive.peak = (unit, backward), alive.current

    def arrived(p: nn.Parameter) -> None:
        nonlocal of_root
        of_root += p.nbytes * (p not in inside)
        p.grad = None

    with FakeTensorMode():
        tensors = [*model.parameters(), *model.buffers()]
        copies: dict[int, Any] = {id(t): stand_in(t) for t in tensors}
        twin, parts = copy.deepcopy((model, units), copies)
        inputs, targets = tree_map_only(Tensor, stand_in, batch)
        inside = {p for part in parts for p in part.parameters()}
        for k, part in enumerate(parts, 1):
            part.register_forward_pre_hook(lambda *_, k=k: enter(k, False))
            part.register_forward_hook(lambda *_: enter(0, False))
            part.register_full_backward_pre_hook(lambda *_, k=k: enter(k, True))
        for p in twin.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(arrived)
        with alive, warnings.catch_warnings():
            # torch 2.8 says so of every first part: a batch needs no gradient
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            value = loss(twin(inputs), targets)
            saved = alive.current
            enter(0, True)
            value.backward()
            enter(0, True)
    return saved, tuple(phases)


def state_ratio(make_optimizer: MakeOptimizer, dtype: torch.dtype) -> float:
    """Bytes of state per byte of parameters, from one step with a small parameter."""
    p = nn.Parameter(torch.zeros(1024, dtype=dtype))
    p.grad = torch.zeros_like(p)
    optimizer = make_optimizer([p])
    optimizer.step()
    return nbytes_of(t for t in tensors_in(optimizer.state[p]) if t.shape == p.shape) / p.nbytes
