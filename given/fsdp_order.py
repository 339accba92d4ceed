"""When a sharded model's units are gathered and freed: one ahead, in the order they are given in.

A forward begins anew: what is still gathered may be older than the shards. While a unit computes
the gather of the next one is under way: in forward that of the unit given after it, in backward
that of the unit given before it. If units run in another order, that costs messages, never a value.
The root stays gathered from its forward to the end of backward.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch

from .fsdp_units import FlatUnit, Gathered, HookedUnits


class Knowing(Gathered, Protocol):
    """Parameters that know whether they are gathered."""

    gathered: bool


Flat = TypeVar("Flat", bound=Knowing)


class OrderedUnits(HookedUnits[Flat], Generic[Flat]):
    """Gathers and frees ``units``; a subclass says what ``after_backward`` sends."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: list[FlatUnit[Flat]] = []  # at most one: gathered before its turn
        self.ended = True  # the last backward came to its end

    def before_forward(self, unit: FlatUnit[Flat]) -> None:
        """Gather ``unit``, then issue the gather of the unit after it."""
        if unit is self.units[0]:
            for left in self.units:  # gradients that no_sync has kept are no remains
                left.free() if self.ended else left.reset()
            self.ended = True
        self._gather(unit, 1)

    def after_forward(self, unit: FlatUnit[Flat]) -> None:
        """Free ``unit``; after the root also what was gathered ahead in vain."""
        root = self.units[0]
        for each in self.units if unit is root else [unit]:
            if each is not root or not torch.is_grad_enabled():
                each.free()

    def before_backward(self, unit: FlatUnit[Flat]) -> None:
        """Gather ``unit``, then issue the gather of the unit before it."""
        self.ended = False
        self._gather(unit, -1)

    def end_backward(self) -> None:
        """End the units whose inputs need no gradient, and wait for the last reduce-scatter."""
        for unit in self.units:
            self.after_backward(unit)
        for unit in self.units:
            unit.finish_reduce()
        self.ended = True

    def _gather(self, unit: FlatUnit[Flat], step: int) -> None:
        """Gather ``unit``, then issue the gather of the unit ``step`` after it, cyclically."""
        following = self.units[(self.units.index(unit) + step) % len(self.units)]
        # one that is gathered is at work: it is no guess, and the guess before it still counts
        there = any(flat.gathered for flat in following.flats)
        kept = self.ahead if there else [following]
        for guess in self.ahead:
            if guess not in (unit, *kept):
                guess.free()
        unit.gather()
        self.ahead = [each for each in kept if each is not unit]
        for each in self.ahead:
            each.start_gather()
