"""Prefetching: the next unit's parameters travel while the current one computes.

Plain FSDP waits for every all-gather and reduce-scatter, and computes nothing meanwhile. But the
last forward tells the order of the units, and gradients are not needed before the optimizer's step:

    compute   |   u1   |   u2   |   u3   |   u3'   |   u2'   |   u1'   |
    gathers   | g1 g2  |   g3   |        |   g2    |   g1    |         |
    reduces   |                          |         |   r3    |   r2    | r1

If a unit computes for longer than its messages take, only the first gather and the last
reduce-scatter stay exposed. Memory: one more unit in full, and in backward one more vector of
gradients, too. Backward begins with the root and with the unit that ran last in forward. So both
stay gathered in between. That saves their second all-gather, (W-1)/W·(P_last + P_root) bytes.

Invariant: at most one unit is gathered ahead, and at most one reduce-scatter is under way. A wrong
guess costs a message, never a wrong value.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 7.2.2. Zhao et al. 2023 (PyTorch
FSDP, arXiv 2304.11277), sections 3.3 (overlap, prefetching) and 3.4 (a limit of gathers under way).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .fsdp import FSDP, Unit


class PrefetchFSDP(FSDP):
    """FSDP whose messages travel beside compute; values and contract are the same.

    The first forward expects the order in which units are given. Every later forward expects the
    order of the forward before it, with autograd or without. A wrong guess costs a message, never a
    value. At most one unit is gathered ahead. If a gathered unit does not come next, in forward or
    in backward, it is freed before another gather is issued. At most one unit's reduce-scatters are
    under way.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module] = (), **options: Any) -> None:
        """As ``FSDP``."""
        super().__init__(module, units, **options)
        self.expected = list(self.units)  # the order of the last forward, the root first
        self.order: list[Unit] = []  # that of this one, so far
        self.held: set[Unit] = set()  # units that forward may have gathered, without the root
        self.to_come: list[Unit] = []  # in backward: those that it has not reached
        self.reducing: list[Unit] = []  # the unit whose reduce-scatters may be under way

    def before_forward(self, unit: Unit) -> None:
        """Gather ``unit``, and issue, after its own gather, that of the one expected after it.

        The second gather travels while ``unit`` computes. With the root's forward everything begins
        anew: units that are still gathered may be older than the shards.
        """
        # --- exercise 3.16: start
        # Step 1: the root begins a new forward. Units that an evaluation or a forward without
        #         backward has left may be older than the shards
        # Step 2: free gathered units that do not come now or next. To look at all units each time
        #         would cost the square of their number. Gather this unit, then issue the next:
        #         gathers run one after another
        if unit is self.units[0]:
            for left in self.units:
                left.reset()
            self.expected, self.order = self.order or self.expected, []
        self.order.append(unit)
        ahead = self.expected[len(self.order) : len(self.order) + 1]
        if not self.in_backward:
            for other in self.held.difference([unit, *ahead]):
                other.free()
            self.held = {unit, *ahead} - {self.units[0]}
        unit.gather()
        for following in ahead:
            following.start_gather()
        # --- exercise 3.16: end

    def after_forward(self, unit: Unit) -> None:
        """Free ``unit``, unless backward begins with it; after the root also wrong guesses.

        With autograd the root stays, and also the unit that is expected last, if it does run last.
        Without autograd no unit stays.
        """
        # --- exercise 3.16: start
        # Step 3: the root and the last unit stay for backward, if there will be one
        root = self.units[0]
        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()
        if unit is root:
            self.to_come = list(self.order)
        for each in self.units if unit is root else [unit]:
            if each not in kept or each not in (root, self.order[-1]):
                each.free()
        # --- exercise 3.16: end

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit``, then issue the gather of the one that ran before it in forward."""
        # --- exercise 3.16: start
        # Step 4: backward takes the units in reverse order; a unit that it passes over was a wrong
        #         guess
        unit.gather()
        if unit in self.to_come[1:]:
            while self.to_come[-1] is not unit:
                self.to_come.pop().free()
            self.to_come.pop()
            self.to_come[-1].start_gather()
        # --- exercise 3.16: end

    def after_backward(self, unit: Unit) -> None:
        """Free ``unit``, wait for the earlier reduce-scatter, and issue this unit's."""
        # --- exercise 3.16: start
        # Step 5: keep only one reduce-scatter under way: that limits the memory of gradients
        unit.free()
        for other in self.reducing:
            other.finish_reduce()
        unit.start_reduce()
        self.reducing = [unit]
        # --- exercise 3.16: end

    def end_backward(self) -> None:
        """Nothing is under way and nothing is gathered when ``backward()`` returns."""
        # --- exercise 3.16: start
        # Step 6: end the units whose inputs need no gradient, and wrong guesses; then wait for the
        #         last handle
        super().end_backward()
        for unit in self.reducing:
            unit.finish_reduce()
        # --- exercise 3.16: end
