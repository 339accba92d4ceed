# for: 3.31
"""Written differently: a communication hook scales each bucket, and an exit stack ends the join."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist

from given.agreement import device_in

from .buckets import partition
from .ddp import DDP, StepAborted


class UnevenDDP(DDP):
    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.state = "none"  # or between, batch, shadow, done
        self.factor, self.place = 1.0, 0

    @contextlib.contextmanager
    def join(self, batches, *, weight=None, throw=False):
        if self.state != "none":
            raise RuntimeError("a join is running already")
        plain = self.hook

        def scaled(bucket):
            bucket.buffer.mul_(self.factor)
            return plain(bucket)

        def leave():
            if self.state in ("batch", "shadow"):
                self.abort()
            if self.state == "between":
                self.exchange(-math.inf)
            self.state = "none"

        with contextlib.ExitStack() as stack:
            self.hook, self.state, self.place = scaled, "between", 0
            stack.callback(setattr, self, "hook", plain)
            stack.callback(leave)
            yield self.rounds(batches, weight or (lambda _: 1.0), throw)

    def exchange(self, value):
        device = device_in(self.group)
        everyone = torch.empty(dist.get_world_size(self.group), dtype=torch.double, device=device)
        mine = torch.full((1,), value, dtype=torch.double, device=device)
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        return everyone.tolist()

    def rounds(self, batches, weight, throw):
        for batch in self.and_then_none(batches):
            value = 0.0
            if batch is not self:
                value = float(weight(batch))
                if not math.isfinite(value) or value <= 0:
                    raise ValueError(f"{value} is no weight")
            values = self.exchange(value)
            if min(values) < 0:
                self.state = "done"
                raise StepAborted(values.index(min(values)))
            if not any(values):
                self.send_state()
                self.state = "done"
                return
            if throw and not all(values):
                self.state = "done"
                raise RuntimeError("uneven")
            self.place = next(k for k, each in enumerate(values) if each)
            self.factor = value * len(values) / sum(values)
            self.send_state()
            self.state = "shadow" if batch is self else "batch"
            yield None if batch is self else batch
            if self.state != "between":
                self.abort()

    def and_then_none(self, batches):
        yield from batches
        while True:
            yield self  # no loader gives the wrapper as a batch

    def send_state(self):
        if self.module.training:
            values = [b.data for b in self.module.buffers()]
            for chosen in partition(values, self.limits[0], self.limits[0]):
                joined = torch.cat([values[k].flatten() for k in chosen])
                dist.broadcast(joined, group=self.group, group_src=self.place)
                for k in chosen:
                    part, joined = joined[: values[k].numel()], joined[values[k].numel() :]
                    values[k].copy_(part.view_as(values[k]))

    def forward(self, *args, **kwargs):
        with self.no_sync() if self.state != "none" else contextlib.nullcontext():
            return super().forward(*args, **kwargs)

    def shadow(self):
        if self.state != "shadow":
            raise RuntimeError("this step is no shadow's")
        self._finish()

    def _finish(self):
        if self.state != "none":
            self.state = "between"
        super()._finish()
