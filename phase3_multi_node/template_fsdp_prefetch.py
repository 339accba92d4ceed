# Exercises 3.16: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.16
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_fsdp import FSDP, Unit


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
        # Step 1: the root begins a new forward. Units that an evaluation or a forward without
        #         backward has left may be older than the shards
        # Step 2: free gathered units that do not come now or next. To look at all units each time
        #         would cost the square of their number. Gather this unit, then issue the next:
        #         gathers run one after another
        raise NotImplementedError("exercise 3.16")

    def after_forward(self, unit: Unit) -> None:
        """Free ``unit``, unless backward begins with it; after the root also wrong guesses.

        With autograd the root stays, and also the unit that is expected last, if it does run last.
        Without autograd no unit stays.
        """
        # Step 3: the root and the last unit stay for backward, if there will be one
        raise NotImplementedError("exercise 3.16")

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit``, then issue the gather of the one that ran before it in forward."""
        # Step 4: backward takes the units in reverse order; a unit that it passes over was a wrong
        #         guess
        raise NotImplementedError("exercise 3.16")

    def after_backward(self, unit: Unit) -> None:
        """Free ``unit``, wait for the earlier reduce-scatter, and issue this unit's."""
        # Step 5: keep only one reduce-scatter under way: that limits the memory of gradients
        raise NotImplementedError("exercise 3.16")

    def end_backward(self) -> None:
        """Nothing is under way and nothing is gathered when ``backward()`` returns."""
        # Step 6: end the units whose inputs need no gradient, and wrong guesses; then wait for the
        #         last handle
        raise NotImplementedError("exercise 3.16")
