# for: 2.6
"""Written from the docstrings alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import Group

from .gradient_accumulation import MicroBatch, accumulate_and_reduce, clip_by_global_norm
from .mixed_precision import MixedPrecision


class LossScaler:
    def __init__(
        self,
        *,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        minimum: float = 1.0,
    ) -> None:
        if not growth_factor > 1:
            raise ValueError(f"growth_factor must be above 1, not {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, not {backoff_factor}")
        if not growth_interval >= 1:
            raise ValueError(f"growth_interval must be at least 1, not {growth_interval}")
        if not hysteresis >= 1:
            raise ValueError(f"hysteresis must be at least 1, not {hysteresis}")
        if not 0 < minimum <= scale < math.inf:
            raise ValueError(f"0 < minimum <= scale < inf does not hold for {minimum} and {scale}")
        self.growth_factor, self.backoff_factor = (growth_factor, backoff_factor)
        self.growth_interval, self.hysteresis, self.minimum = (growth_interval, hysteresis, minimum)
        self.scale = float(scale)
        self.quiet_steps = 0
        self.overflows = 0
        self.finite: bool | None = None

    def unscale(self, parameters: Iterable[nn.Parameter], group: Group = None) -> bool:
        if self.finite is not None:
            raise ValueError("the gradients of this step are unscaled already; update ends a step")
        distinct = list(dict.fromkeys(parameters))
        extremes = []
        with torch.no_grad():
            for p in distinct:
                g = p.grad
                if g is None or g.numel() == 0:
                    continue
                if g.dtype in (torch.float16, torch.bfloat16):
                    g.copy_(g.float() / self.scale)
                else:
                    g.div_(self.scale)
                extremes += [x.double() for x in torch.aminmax(g)]
        if distinct:
            device = distinct[0].device
        elif dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            device = torch.device("cpu")
        found = torch.zeros((), device=device)
        if extremes:
            found += torch.stack(extremes).isfinite().logical_not().any()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        self.finite = not bool(found)
        return self.finite

    def update(self) -> None:
        if self.finite is None:
            raise ValueError("there was no unscale in this step")
        if self.finite:
            self.overflows = 0
            self.quiet_steps += 1
            if self.quiet_steps >= self.growth_interval:
                self.quiet_steps = 0
                grown = self.scale * self.growth_factor
                if grown <= torch.finfo(torch.float32).max:
                    self.scale = grown
        else:
            self.quiet_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, min(self.scale, self.minimum))
        self.finite = None

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "quiet_steps": self.quiet_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self.quiet_steps = int(state["quiet_steps"])
        self.overflows = int(state["overflows"])
        self.finite = None


def scaled_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float, bool]:
    if max_norm is not None and (not max_norm > 0):
        raise ValueError(f"the limit of the norm must be positive, not {max_norm}")
    loss, total = accumulate_and_reduce(model, window, loss_scale=scaler.scale, group=group)
    if total == 0:
        return (0.0, 0.0, False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    finite = scaler.unscale(parameters, group)
    norm = clip_by_global_norm(parameters, math.inf if max_norm is None else max_norm)
    if finite:
        for p in model.parameters():
            if not p.requires_grad:
                p.grad = None
        optimizer.step()
        model.write_back()
    scaler.update()
    return (loss, norm, finite)
