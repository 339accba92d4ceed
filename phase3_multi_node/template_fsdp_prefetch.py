# Exercises 3.16: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.16
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_fsdp import FSDP, Unit


class PrefetchFSDP(FSDP):
    """FSDP whose messages travel beside compute; values and contract are the same.

    The first forward expects the order in which units are given, every later one the order of the
    forward before it, with autograd or without. A wrong guess costs a message, never a value. At
    most one unit is gathered ahead: in forward and backward a unit that was gathered, and does not
    come next, is freed before another one is issued. At most one unit's reduce-scatters are under
    way.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module] = (), **options: Any) -> None:
        """As ``FSDP``."""
        super().__init__(module, units, **options)
        self.expected = list(self.units)  # the order of the last forward, the root first
        self.order: list[Unit] = []  # that of this one, so far
        self.to_come: list[Unit] = []  # in backward: those that it has not reached

    def before_forward(self, unit: Unit) -> None:
        """Gather ``unit``, and issue, after its own gather, that of the one expected after it.

        That travels while ``unit`` computes. With the root's forward everything begins anew: what
        was left gathered may be older than the shards.
        """
        # Step 1: the root begins a new forward: what an evaluation or a forward without backward
        #         has left may be older than the shards
        # Step 2: free what was gathered and does not come now or next; gather this unit, then
        #         issue the next: gathers are done one by one
        raise NotImplementedError("exercise 3.16")

    def after_forward(self, unit: Unit) -> None:
        """Free ``unit``, unless backward begins with it; after the root also wrong guesses.

        With autograd the root and the unit that is expected last stay, the latter only if it does
        run last; without autograd nothing stays.
        """
        # Step 3: the root and the last unit stay for backward, if there will be one
        raise NotImplementedError("exercise 3.16")

    def before_backward(self, unit: Unit) -> None:
        """Gather ``unit``, then issue the gather of the one that ran before it in forward."""
        # Step 4: backward comes in the opposite order; what it has passed over was a wrong guess
        raise NotImplementedError("exercise 3.16")

    def after_backward(self, unit: Unit) -> None:
        """Free ``unit``, wait for the reduce-scatter before, and issue this unit's."""
        # Step 5: one reduce-scatter under way bounds the memory of gradients
        raise NotImplementedError("exercise 3.16")

    def end_backward(self) -> None:
        """Nothing is under way and nothing is gathered when ``backward()`` returns."""
        # Step 6: units whose inputs need no gradient, and wrong guesses; then the last handle
        raise NotImplementedError("exercise 3.16")
