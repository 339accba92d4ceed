"""Prefetching: the next unit's parameters travel while the current one computes.

Plain FSDP waits for every all-gather and reduce-scatter with idle hands. But the order of the units
is known from the last forward, and gradients are not needed before the optimizer's step:

    compute   |   u1   |   u2   |   u3   |   u3'   |   u2'   |   u1'   |
    gathers   | g1 g2  |   g3   |        |   g2    |   g1    |         |
    reduces   |                          |         |   r3    |   r2    | r1

If a unit computes for longer than its messages take, only the first gather and the last
reduce-scatter stay exposed. Memory: one more unit in full in forward; in backward one more and one
more vector of gradients. The unit that runs last in forward comes first in backward, and so does
the root: both stay gathered in between, which saves their second all-gather,
(W-1)/W·(P_last + P_root) bytes.

Invariant: at most one unit is gathered ahead, at most one reduce-scatter is under way; a wrong
guess costs a message, never a wrong value.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 7.2.2; Zhao et al. 2023 (PyTorch
FSDP, arXiv 2304.11277), section 3.3 (overlap, prefetching, a limit of gathers under way).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .fsdp import FSDP, Unit


class PrefetchFSDP(FSDP):
    """FSDP whose messages travel beside compute; values and contract are the same.

    Units should be given in the order in which they run; from the second forward on the order of
    the previous one is expected.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module] = (), **options: Any) -> None:
        """As ``FSDP``."""
        super().__init__(module, units, **options)
        self.expected = list(self.units)  # the order of the last forward, the root first
        self.order: list[Unit] = []  # that of this one, so far
        self.reducing: Unit | None = None

    def before_forward(self, unit: Unit) -> None:
        """Gather ``unit``, and begin with the one that is expected after it."""
        # --- exercise 3.16: start
        # Step 1: the root begins a new forward: what an evaluation or a forward without backward
        #         has left may be older than the shards
        # Step 2: wait for this unit first, then issue the next: gathers are done one by one
        if unit is self.units[0]:
            for left in self.units:
                left.free()
            self.expected, self.order = self.order or self.expected, []
        self.order.append(unit)
        unit.gather()
        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
        # --- exercise 3.16: end

    def after_forward(self, unit: Unit) -> None:
        """Free ``unit``, unless backward begins with it; after the root also wrong guesses."""
        # --- exercise 3.16: start
        # Step 3: the root and the last unit stay for backward, if there will be one
        root = self.units[0]
        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()
        for each in self.units if unit is root else [unit]:
            if each not in kept:
                each.free()
        # --- exercise 3.16: end

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit``, and begin with the one that ran before it."""
        # --- exercise 3.16: start
        # Step 4: backward comes in the opposite order
        unit.gather()
        index = self.order.index(unit) if unit in self.order else 0
        if index > 0:
            self.order[index - 1].start_gather()
        # --- exercise 3.16: end

    def after_backward(self, unit: Unit) -> None:
        """Free ``unit`` and issue its reduce-scatter; the one before is waited for now."""
        # --- exercise 3.16: start
        # Step 5: one reduce-scatter under way bounds the memory of gradients
        unit.free()
        if self.reducing is not None:
            self.reducing.finish_reduce()
        unit.start_reduce()
        self.reducing = unit
        # --- exercise 3.16: end

    def end_backward(self) -> None:
        """Nothing may be under way when ``backward()`` returns."""
        # --- exercise 3.16: start
        # Step 6: units whose inputs need no gradient, and wrong guesses; then the last handle
        super().end_backward()
        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None
        # --- exercise 3.16: end
