# for: 4.14
"""Written differently: one loop in which the end is a step without a batch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from given.agreement import Group

from .elastic import adapt
from .fault_tolerance import CheckpointStore
from .resume import Position, TrainingState, batches
from .watchdog import Heartbeat


class PreemptionGuard:
    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        group: Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.signals, self.group, self.device = (signals, group, device)
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionGuard:
        for number in self.signals:
            if number in self._before:
                continue
            self._before[number] = signal.getsignal(number)
            try:
                signal.signal(number, self._note)
            except BaseException:
                del self._before[number]
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def agreed(self) -> bool:
        mine = self.requested
        if dist.is_initialized():
            votes = torch.full((), float(mine), dtype=torch.float32, device=self.device)
            dist.all_reduce(votes, op=dist.ReduceOp.SUM, group=self.group)
            return votes.item() > 0
        return mine


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
    if save_every < 1:
        raise ValueError(f"save_every must be positive, got {save_every}")
    found = store.load()
    if found is None:
        position, last = (Position(), -1)
    else:
        ranks = 1 if not dist.is_initialized() else dist.get_world_size(group)
        position = state.restore(adapt(found, ranks, seed=seed))
        last = position.step
    coming = batches(loader, position, epochs)
    nothing = object()
    while True:
        batch = next(coming, nothing)
        leaving = False
        if batch is not nothing:
            heartbeat.beat(position.step, "train")
            train_step(batch, position)
            leaving = guard.agreed()
        due = leaving or batch is nothing or position.step % save_every == 0
        if due and position.step != last:
            heartbeat.beat(position.step, "checkpoint")
            parts = state.capture(position)
            store.save(position.step, *parts)
            last = position.step
        if leaving:
            return False
        if batch is nothing:
            return True
