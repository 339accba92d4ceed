# Exercises 3.31: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.31
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, Join,
# FSDP, ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Uneven inputs: ranks without a batch shadow the others' collectives, until nobody has one.

Ranks may have different numbers of batches: files have different lengths, and filters drop samples.
A rank that stops early leaves the others waiting in their next collective. So before every step
each rank tells whether it has a batch. A rank without one sends the same messages, with zeros:

    rank 0   weight 1 | batch | 1 | batch  | 0 | shadow | 0   nobody has a batch: the end
    rank 1   weight 1 | batch | 1 | batch  | 1 | batch  | 0
    rank 2   weight 1 | batch | 0 | shadow | 0 | shadow | 0
    mean over    all three       0 and 1      1 alone

With the weights n_r of the ranks' batches (0 without one) the gradient of a step is
Σ_r n_r·g_r / Σ_r n_r. If n_r is the number of samples, it is the gradient of one process whose
batch is the union of the ranks' batches. Every rank takes every step of its optimizer, also as a
shadow. So weights and the optimizer's state need no message at the end.

Per step and rank: one all-gather of 8 bytes, and all messages of ``DDP``. At the end one more
all-gather, and the buffers once more.
Invariant: before every step all ranks know which of them have a batch. All ranks end after the same
step, with equal weights, gradients and buffers.
Sources: Goyal et al. 2017 (arXiv 1706.02677), section 2.3 (the mean over all samples). Li et al.
2020 (arXiv 2006.15704), section 3.2.3 (why every rank must send every bucket).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import device_in

from .template_buckets import partition
from .template_ddp import DDP, StepAborted

T = TypeVar("T")


class UnevenDDP(DDP):
    """``DDP``, with all that it promises, for ranks with different numbers of batches.

    with model.join(loader) as batches:
        for batch in batches:
            optimizer.zero_grad()
            if batch is None:
                model.shadow()
            else:
                loss_of(model, batch).backward()
            optimizer.step()

    In ``join`` every rank takes as many steps as the rank with the most batches. The gradient of a
    step is the mean over the ranks that have a batch, weighted if so asked. A shadow has it, too.
    With ``agree`` a gradient that none of these ranks has stays None on every rank. Beside what
    ``DDP`` waits for, the host waits for a GPU at most twice per step. Outside of ``join`` it is
    ``DDP``, also after a join that raised.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        """As ``DDP``; a collective call."""
        super().__init__(module, **options)
        self.over = True  # no join is running, or all ranks know that it ends
        self.owed = False  # the other ranks wait for this rank's part of a step
        self.shadows = False  # in this step the rank has no batch
        self.source = 0  # the number in the group of the rank whose buffers count

    @contextlib.contextmanager
    def join(
        self,
        batches: Iterable[T],
        *,
        weight: Callable[[T], float] = lambda _: 1.0,
        throw: bool = False,
    ) -> Iterator[Iterator[T | None]]:
        """Gives this rank's ``batches``, one per step, and None while only other ranks have one.

        A step is one backward that sends: for a window of ``no_sync`` a batch is the whole window.
        ``weight(batch)``: how much the rank's gradient counts in the mean, by default 1. With the
        number of samples, and losses that are means, it is exact to one process. The number of
        forwards in a step is free. They send nothing: while ``module.training`` is set, the buffers
        of the first rank with a batch come with the batch. After the last step all ranks have the
        buffers of the first rank that had a batch in it.

        ``throw``: if some ranks have a batch and others have none, all ranks raise RuntimeError
        (no StepAborted) instead of that step.

        A batch without a backward that sends is given up like a step that fails: the others are
        told as ``DDP.abort`` says. If the body ends by an exception or by ``break``, or the loader
        raises, this rank gives up its step and the join. The others then raise StepAborted with its
        number, at the latest when they ask for their next batch. So no rank waits for ever, and the
        exception of a rank stays its own. If all ranks leave after the same step, none raises
        StepAborted.

        Raises RuntimeError if a join of this wrapper is running, which goes on. Raises ValueError
        for a weight that is not positive or not finite, on the rank that has it.
        """
        # Step 1: whatever ends the body, the other ranks wait. Send what this step owes, then tell
        #         them, unless they know
        raise NotImplementedError("exercise 3.31")

    def _steps(
        self, batches: Iterable[T], weight: Callable[[Any], float], throw: bool
    ) -> Iterator[T | None]:
        """The batches of this rank, then None until no rank has one."""
        # Step 2: end the step before. Then ask the loader, and tell the others what it gave: they
        #         all decide from the same list
        # Step 3: NaN on a rank: it has left. Zero on all: the end. A rank's share of the mean is
        #         its weight in the sum of all weights
        # Step 4: the buffers come from a rank that has a batch
        raise NotImplementedError("exercise 3.31")

    def _tell(self, mine: float) -> list[float]:
        """What each rank of the group has told; all call it. One all-gather of 8 bytes (float64).

        The weight of its batch, 0 without one, NaN if it leaves the join.
        """
        raise NotImplementedError("exercise 3.31")

    def _send_buffers(self) -> None:
        """Give every rank the buffers of ``source``, if ``module`` is training.

        One broadcast for each ``bucket_bytes`` of a dtype, as in ``DDP.forward``.
        """
        # Step 5: as `broadcast_tensors`, but from another rank than the first one
        raise NotImplementedError("exercise 3.31")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ``DDP.forward``; in a join it sends nothing, because the buffers are there."""
        # Step 6: for buffers `no_sync` counts where forward runs, for gradients where backward runs
        raise NotImplementedError("exercise 3.31")

    def shadow(self) -> None:
        """This rank's part of a step for which it has no batch: afterwards it has the gradients.

        It sends what the others' backward sends, and raises what that raises. Raises RuntimeError,
        before anything is sent, unless the batch of this step is None and nothing was sent for it.
        """
        # Step 7: the end of a backward in which no gradient came; its share is zero
        raise NotImplementedError("exercise 3.31")

    def _finish(self) -> None:
        """As ``DDP._finish``: afterwards this step owes nothing."""
        raise NotImplementedError("exercise 3.31")

    def _settle(self) -> None:
        """Give up the step if the others still wait for this rank's part."""
        # Step 8: `abort` sends what they wait for, and raises nothing
        raise NotImplementedError("exercise 3.31")
