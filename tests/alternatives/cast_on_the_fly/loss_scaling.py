# for: 2.6
"""Written differently: quiet steps and overflows in a row are one number with a sign."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .mixed_precision import clip, reduced


class LossScaler:
    """``run``: quiet steps in a row if positive, overflows in a row if negative."""

    def __init__(
        self,
        *,
        scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        hysteresis=1,
        minimum=1.0,
    ):
        for name, value, good in (
            ("growth_factor", growth_factor, growth_factor > 1),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1),
            ("growth_interval", growth_interval, growth_interval >= 1),
            ("hysteresis", hysteresis, hysteresis >= 1),
            ("minimum", minimum, minimum > 0),
            ("scale", scale, minimum <= scale < math.inf),
        ):
            if not good:
                raise ValueError(f"{name} can't be {value}")
        self.scale, self.run, self.found = float(scale), 0, None
        self.growth, self.backoff = growth_factor, backoff_factor
        self.interval, self.patience, self.minimum = growth_interval, hysteresis, minimum

    def unscale(self, parameters, group=None):
        if self.found is not None:
            raise ValueError("these gradients are unscaled already")
        found = {id(p): p for p in parameters}.values()
        bad = torch.zeros(1, dtype=torch.int32, device=next((p.device for p in found), None))
        for p in found:
            if p.grad is not None:
                bad += (~torch.isfinite(p.grad)).any()
                p.grad.copy_(p.grad / self.scale)
        dist.all_reduce(bad, group=group)
        self.found = bool(bad)
        return not self.found

    def update(self):
        if self.found is None:
            raise ValueError("nothing was unscaled")
        overflow, self.found = self.found, None
        self.run = min(self.run, 0) - 1 if overflow else max(self.run, 0) + 1
        if overflow and -self.run >= self.patience:
            self.scale = max(self.minimum, self.scale * self.backoff)
        if self.run >= self.interval:
            self.run, grown = 0, self.scale * self.growth
            self.scale = grown if grown < 2.0**128 else self.scale

    def state_dict(self):
        return {"scale": self.scale, "run": self.run}

    def load_state_dict(self, state):
        self.scale, self.run = state["scale"], state["run"]


def scaled_step(model, optimizer, scaler, window, *, max_norm=None, group=None):
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"can't clip to {max_norm}")
    loss, total, trainable = reduced(model, window, scaler.scale, group)
    if not total:
        return 0.0, 0.0, False
    finite = scaler.unscale(trainable, group)
    norm = clip(trainable, max_norm)
    scaler.update()
    if finite:
        optimizer.step()
    return loss, norm, finite
