# for: 3.16
"""Written differently: backward has a list of what is before it; nothing is waited for early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from solutions.phase3_multi_node.fsdp import FSDP, Unit


class PrefetchFSDP(FSDP):
    def __init__(self, module: nn.Module, units: Sequence[nn.Module] = (), **options: Any) -> None:
        super().__init__(module, units, **options)
        self.expected = list(self.units)
        self.order: list[Unit] = []
        self.backward_order: list[Unit] = []
        self.sending: Unit | None = None

    def before_forward(self, unit: Unit) -> None:
        if unit is self.units[0]:
            for every in self.units:
                every.reset()
            self.order = []
        self.order.append(unit)
        here = len(self.order)
        next_units = [n for n in self.expected[here : here + 1] if n is not unit]
        for other in self.units[1:]:
            if other is not unit and other not in next_units:
                other.free()
        unit.start_gather()
        for other in next_units:
            other.start_gather()
        unit.gather()

    def after_forward(self, unit: Unit) -> None:
        grad = torch.is_grad_enabled()
        if not grad or unit not in (self.units[0], self.expected[-1]):
            unit.free()
        if unit is self.units[0]:
            ran_last = self.order[-1]
            for every in self.units[1:]:
                if not (grad and every is ran_last and (every is self.expected[-1])):
                    every.free()
            self.expected = self.order[:]
            self.backward_order = self.order[::-1]

    def before_backward(self, unit: Unit) -> None:
        unit.start_gather()
        root = self.units[0]
        wanted: Unit | None = None
        if unit is not root and unit in self.backward_order:
            at = self.backward_order.index(unit)
            self.backward_order = self.backward_order[at:]
            wanted = self.backward_order[1]
        for other in self.units[1:]:
            if unit is root or other in (unit, wanted):
                continue
            if any(leaf.grad is not None for flat in other.flats for leaf in flat.leaves):
                self.after_backward(other)
            else:
                other.free()
        unit.gather()
        if wanted is not None:
            wanted.start_gather()

    def after_backward(self, unit: Unit) -> None:
        unit.free()
        before, self.sending = self.sending, None
        if before is not None:
            before.finish_reduce()
        unit.start_reduce()
        self.sending = unit

    def end_backward(self) -> None:
        for unit in reversed(self.units):
            self.after_backward(unit)
        if self.sending is not None:
            self.sending.finish_reduce()
        self.sending = None
        self.backward_order = self.order[::-1]
