# Handlers on a stack, epoch by epoch; for: 4.14

from __future__ import annotations

import contextlib
import signal

import torch
import torch.distributed as dist

from .elastic import adapt
from .resume import Position


class PreemptionGuard:
    """A list that a handler appends to."""

    def __init__(self, signals=(signal.SIGTERM, signal.SIGUSR1), group=None, device="cpu"):
        self.group, self.device = group, device
        self.requested = False
        self.stack = contextlib.ExitStack()
        self.signals = signals

    def __enter__(self):
        for number in self.signals:
            old = signal.signal(number, lambda *_: setattr(self, "requested", True))
            self.stack.callback(signal.signal, number, old)
        return self

    def __exit__(self, *error):
        self.stack.close()

    def agreed(self):
        count = torch.zeros(1, dtype=torch.int32, device=self.device)
        count += int(self.requested)
        if dist.is_initialized():
            dist.all_reduce(count, group=self.group)
        return count.item() > 0


def train(
    train_step, loader, *, epochs, save_every, store, state, guard, heartbeat, seed=0, group=None
):
    """Epoch by epoch, with iterators of its own."""
    if save_every <= 0:
        raise ValueError(f"save every {save_every} steps?")
    found = store.load()
    at = Position()
    if found:
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        at = state.restore(adapt(found, size, seed))
    saved = at.step
    while at.epoch < epochs:
        loader.batch_sampler.set_epoch(at.epoch)
        for batch in loader:
            at.step, at.batch = at.step + 1, at.batch + 1
            heartbeat.beat(at.step, "training")
            train_step(batch, at)
            leave = guard.agreed()
            if leave or not at.step % save_every:
                heartbeat.beat(at.step, "saving")
                store.save(at.step, *state.capture(at))
                saved = at.step
            if leave:
                return False
        at.epoch, at.batch = at.epoch + 1, 0
    if saved != at.step:
        heartbeat.beat(at.step, "saving")
        store.save(at.step, *state.capture(at))
    return True
