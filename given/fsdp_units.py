"""Units of a sharded model: which parameters each has, and hooks that say when it computes.

A unit is a module whose parameters are gathered and freed together. Autograd knows no units.
Backward reaches a unit when a gradient of its output is there. It is done with the unit when the
gradient of its input is there. A hook on a view of each input tells that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .agreement import rank_in

Attribute = tuple[nn.Module, str, str]  # a module, its attribute, the parameter's full name
Parameters = dict[nn.Parameter, list[Attribute]]  # a tied parameter is in several


class Gathered(Protocol):
    """Parameters as one vector, which has memory only for a while."""

    leaves: list[Tensor]
    reducing: tuple[dist.Work, Tensor, Tensor] | None

    def start_gather(self) -> None:
        """Issue the all-gather, unless the vector is there."""

    def finish_gather(self) -> None:
        """Wait for it."""

    def free(self) -> None:
        """Give the memory back."""

    def start_reduce(self) -> None:
        """Issue the reduce-scatter of the gradients that are there."""

    def finish_reduce(self) -> None:
        """Wait for it."""


Flat = TypeVar("Flat", bound=Gathered)


@dataclass(eq=False)
class FlatUnit(Generic[Flat]):
    """A module whose parameters are gathered and freed together: one vector per dtype and kind."""

    module: nn.Module
    flats: list[Flat]

    def start_gather(self) -> None:
        """Issue the all-gathers of vectors that are not there."""
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        """Make the full parameters usable."""
        self.start_gather()
        for flat in self.flats:
            flat.finish_gather()

    def free(self) -> None:
        """Give their memory back."""
        for flat in self.flats:
            flat.free()

    def reset(self) -> None:
        """Free them, and forget the gradients that a backward that raised has left."""
        for flat in self.flats:
            flat.free()
            for leaf in flat.leaves:
                leaf.grad = None
            if flat.reducing is not None:
                flat.reducing[0].wait()
                flat.reducing = None

    def start_reduce(self) -> None:
        """Issue the reduce-scatters of the gradients that are there."""
        for flat in self.flats:
            flat.start_reduce()

    def finish_reduce(self) -> None:
        """Wait for them; afterwards the shards have their gradients."""
        for flat in self.flats:
            flat.finish_reduce()


class HookedUnits(nn.Module, Generic[Flat]):
    """A module that is told when each of its ``units`` computes.

    A subclass sets ``module`` and ``units`` (the root first), calls ``watch_units`` and says what
    happens at the five moments. What is ``fixed`` stays as ``watch_units`` finds it.
    """

    module: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.units: list[FlatUnit[Flat]] = []
        self.in_backward = False

    def before_forward(self, unit: FlatUnit[Flat]) -> None:
        """``unit``'s forward begins."""
        raise NotImplementedError

    def after_forward(self, unit: FlatUnit[Flat]) -> None:
        """``unit``'s forward is done."""
        raise NotImplementedError

    def before_backward(self, unit: FlatUnit[Flat]) -> None:
        """A gradient of ``unit``'s output is there; called once for each output."""
        raise NotImplementedError

    def after_backward(self, unit: FlatUnit[Flat]) -> None:
        """``unit``'s backward is done."""
        raise NotImplementedError

    def end_backward(self) -> None:
        """The whole backward is done, also that of units whose inputs need no gradient."""
        raise NotImplementedError

    def fixed(self) -> list[object]:
        """What must stay as ``watch_units`` finds it."""
        return [(p.dtype, str(p.device), p.requires_grad) for p in self.parameters()]

    def watch_units(self) -> None:
        """Set the hooks."""
        self.found = self.fixed()
        for unit in self.units:
            owner = unit.module
            owner.register_forward_pre_hook(partial(self._enter, unit), with_kwargs=True)
            owner.register_forward_hook(partial(self._leave, unit))

    def _enter(
        self, unit: FlatUnit[Flat], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before forward: replace each input by a view, whose gradient comes when the unit is
        done."""
        if module is self.module:
            if self.fixed() != self.found:
                raise ValueError("parameters were frozen, cast or moved: do it before wrapping")
            self.in_backward = False  # a backward that raised has not come to its end
        self.before_forward(unit)

        def watched(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
                return value
            view = value.view_as(value)
            view.register_hook(lambda _: self.after_backward(unit))
            return view

        # the root's end is the whole backward's end: its inputs may be needed before the units'
        return (args, kwargs) if module is self.module else tree_map(watched, (args, kwargs))

    def _leave(self, unit: FlatUnit[Flat], module: nn.Module, args: Any, output: Any) -> None:
        """After forward."""
        self.after_forward(unit)
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self._backward_reaches(unit))

    def _backward_reaches(self, unit: FlatUnit[Flat]) -> None:
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self.before_backward(unit)

    def _backward_ends(self) -> None:
        self.in_backward = False
        self.end_backward()


def owned_parameters(
    module: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup | None
) -> list[list[Parameters]]:
    """For the root and each unit its distinct parameters, with all their attributes.

    Parameters of one dtype that are all trainable or all frozen are together. They are taken out of
    their modules, so ``parameters()`` does not list them. Raises as ``placed_parameters`` does.
    """
    owned = placed_parameters(module, units, group)
    for mine in owned:
        for part, name, _ in (attribute for every in mine.values() for attribute in every):
            part._parameters.pop(name, None)
    return [alike(mine, lambda p: (p.dtype, p.requires_grad)) for mine in owned]


def placed_parameters(
    module: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup | None
) -> list[Parameters]:
    """For the root and each unit its distinct parameters, with all their attributes.

    Raises ValueError if units overlap or are not inside ``module``, or if a parameter is tied
    across units. It does so, too, if parameters are on several devices, if none is trainable, or if
    this rank is no member of ``group``.
    """
    rank_in(group)
    names = {part: name for name, part in module.named_modules()}
    owner = dict.fromkeys(names, 0)
    for number, unit in enumerate(units, 1):
        if unit not in names or unit is module:
            raise ValueError(f"unit {number - 1} is not a submodule of the module to shard")
        for part in unit.modules():
            if owner[part]:
                both = f"{owner[part] - 1} and {number - 1}"
                raise ValueError(f"units overlap: {names[part]!r} is in both {both}")
            owner[part] = number
    owned: list[Parameters] = [{} for _ in range(len(units) + 1)]
    home: dict[nn.Parameter, int] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if home.setdefault(parameter, owner[part]) != owner[part]:
                raise ValueError(f"{full_name} is tied to a parameter of another unit")
            owned[owner[part]].setdefault(parameter, []).append((part, name, full_name))
    devices = {str(parameter.device) for parameter in home}
    if len(devices) > 1:
        raise ValueError(f"the module's parameters are on several devices: {sorted(devices)}")
    if not any(parameter.requires_grad for parameter in home):
        raise ValueError(f"none of the module's {len(home)} parameters is trainable")
    return owned


def alike(mine: Parameters, kind: Callable[[nn.Parameter], object]) -> list[Parameters]:
    """The parameters in lists of one ``kind`` each."""
    kinds: dict[object, Parameters] = {}
    for parameter, attributes in mine.items():
        kinds.setdefault(kind(parameter), {})[parameter] = attributes
    return list(kinds.values())
