# for: 3.31
"""Written differently: an object per join that is context and iterator, and a list of answers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from given.agreement import device_in

from .ddp import DDP, StepAborted

LEAVES, OUT = -1.0, 0.0


class Join:
    """One join of one rank."""

    def __init__(self, ddp, batches, weight, throw):
        self.ddp, self.batches, self.weight, self.throw = ddp, batches, weight, throw
        self.everyone_knows = False
        self.first = 0

    def __enter__(self):
        if self.ddp.current is not None:
            raise RuntimeError("one join at a time")
        self.ddp.current, self.ddp.turn = self, None
        return self

    def __exit__(self, *_):
        self.close_step()
        if not self.everyone_knows:
            self.ask(LEAVES)
        self.ddp.current, self.ddp.turn = None, None
        self.ddp.share = 1 / dist.get_world_size(self.ddp.group)

    def __iter__(self):
        self.own = iter(self.batches)
        return self

    def close_step(self):
        if self.ddp.turn is not None:
            self.ddp.abort()

    def ask(self, value):
        ddp = self.ddp
        answer = torch.zeros(1, dtype=torch.float64, device=device_in(ddp.group))
        answers = [torch.zeros_like(answer) for _ in range(dist.get_world_size(ddp.group))]
        dist.all_gather(answers, answer + value, group=ddp.group)
        return torch.cat(answers).tolist()

    def __next__(self):
        if self.everyone_knows:
            raise StopIteration
        if not hasattr(self, "own"):
            iter(self)
        self.close_step()
        mine, batch = OUT, None
        for batch in self.own:
            mine = float(self.weight(batch))
            if not (mine > 0 and mine < float("inf")):
                raise ValueError(f"weight {mine}")
            break
        answers = self.ask(mine)
        if LEAVES in answers:
            self.everyone_knows = True
            raise StepAborted(answers.index(LEAVES))
        outs = answers.count(OUT)
        if outs == len(answers):
            self.everyone_knows = True
            self.spread()
            raise StopIteration
        if outs and self.throw:
            self.everyone_knows = True
            raise RuntimeError("a rank has no batch left")
        self.first = min(rank for rank, value in enumerate(answers) if value)
        self.ddp.share = mine / sum(answers)
        self.spread()
        self.ddp.turn = "batch" if mine else "shadow"
        return batch if mine else None

    def spread(self):
        if not self.ddp.module.training:
            return
        by_dtype = {}
        for buffer in self.ddp.module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer.data)
        for same in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            for piece in flat.split(max(1, self.ddp.limits[0] // flat.element_size())):
                dist.broadcast(piece, group=self.ddp.group, group_src=self.first)
            at = 0
            for buffer in same:
                buffer.copy_(flat[at : at + buffer.numel()].view_as(buffer))
                at += buffer.numel()


class UnevenDDP(DDP):
    current = None
    turn = None

    def join(self, batches, *, weight=lambda _: 1, throw=False):
        return Join(self, batches, weight, throw)

    def forward(self, *args, **kwargs):
        before, self.sync = self.sync, self.sync and self.current is None
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.sync = before

    def shadow(self):
        if self.turn != "shadow":
            raise RuntimeError("nothing to shadow")
        self._finish()

    def _finish(self):
        self.turn = None
        return super()._finish()
