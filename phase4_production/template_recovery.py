# Exercises 4.14: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.14
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states.
"""Going on by itself: all ranks leave at the same step, and a restart begins where they saved.

Four things can happen to a rank. A process notices, and training goes on:

    killed           agent: all start again         loop: from the newest checkpoint
    hangs            watchdog: all end, with a report (exercise 4.5), then as above
    fails            the rank tells the others' watchdogs, which end theirs; then as above
    taken away       SIGTERM: all save at the same step, then leave with a status that restarts

Let a checkpoint every k steps take s seconds, a step t seconds, and let a failure come every F
seconds on average. At most k steps are done again, k/2 on average. The overhead s/(k·t) + k·t/(2F)
is smallest for k·t = sqrt(2·s·F).

Messages: one all-reduce of 4 bytes per step (``PreemptionGuard.agreed``). Invariant: interrupted
and resumed training equals uninterrupted training, whatever the interruption was.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval" (CACM 17);
torchrun's manual, "Elastic Launch".
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from given.agreement import Group

from .template_elastic import adapt
from .template_fault_tolerance import CheckpointStore
from .template_resume import Position, TrainingState, batches
from .template_watchdog import Heartbeat


class PreemptionGuard:
    """Notes that this process is to end soon, and lets all ranks leave at the same step.

    ``with PreemptionGuard() as guard:`` takes over ``signals``, and no others, until the block is
    left, also by an exception. Then each has its earlier handler again. Schedulers and agents send
    SIGTERM before they kill (30 s later, by default). SLURM can be asked to send SIGUSR1.
    ``requested``: this rank has received one. Nothing else happens when one comes.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        group: Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.signals, self.group, self.device = signals, group, device
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionGuard:
        # Step 1: take over, and remember the handlers before
        raise NotImplementedError("exercise 4.14")

    def __exit__(self, *error: object) -> None:
        # Step 2: give back
        raise NotImplementedError("exercise 4.14")

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler: it may run between any two lines."""
        # Step 3: only a flag: a save that begins here would be in the middle of a step
        raise NotImplementedError("exercise 4.14")

    def agreed(self) -> bool:
        """Whether any rank of ``group`` is to leave; the same answer on all of them.

        It is one all-reduce of 4 bytes. A single process without process group answers for itself.
        """
        # Step 4: signals reach ranks at different times, or reach only some: the maximum decides
        raise NotImplementedError("exercise 4.14")


def train(
    train_step: Callable[[Any, Position], object],
    loader: DataLoader[Any],
    *,
    epochs: int,
    save_every: int,
    store: CheckpointStore,
    state: TrainingState,
    guard: PreemptionGuard,
    heartbeat: Heartbeat,
    seed: int = 0,
    group: Group = None,
) -> bool:
    """Train to the end of epoch ``epochs`` - 1, from the newest checkpoint if there is one.

    Calls ``train_step(batch, position)`` for each of ``batches`` (exercise 4.2), and asks ``guard``
    after each, whether any rank is to leave. The checkpoint may be of any number of ranks: it is
    adapted (4.4) to those of ``group``, with ``seed``. Saves a capture of ``state`` whenever the
    number of steps since the run's very beginning divides by ``save_every``, at the end, and when a
    rank is to leave. It saves no step twice. After the save for leaving it returns False, and the
    caller must exit with EXIT_PREEMPTED. It returns True if training is done. If the run was done
    before, it trains and saves nothing, and returns True. An exception of ``train_step`` goes on to
    the caller, and nothing is saved. Beats before each step and each save, with its number. The
    call is collective. Raises ValueError if ``save_every`` is not positive.
    """
    if save_every < 1:
        raise ValueError(f"save_every must be positive, got {save_every}")
    # Step 5: begin with the newest checkpoint, adapted to this many ranks, and save the end, too
    # Step 6: agree on leaving before you decide whether to save: all ranks save, then all leave
    raise NotImplementedError("exercise 4.14")
