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
        allowed = {
            "growth_factor": growth_factor > 1,
            "backoff_factor": 0 < backoff_factor < 1,
            "growth_interval": growth_interval >= 1,
            "hysteresis": hysteresis >= 1,
            "minimum, scale": 0 < minimum <= scale and math.isfinite(scale),
        }
        bad = [name for name, fine in allowed.items() if not fine]
        if bad:
            raise ValueError("impossible settings: " + ", ".join(bad))
        self.settings = (growth_factor, backoff_factor, growth_interval, hysteresis, minimum)
        self.scale = 1.0 * scale
        self.until = [0, 0]
        self.pending: list[bool] = []

    def unscale(self, parameters: Iterable[nn.Parameter], group: Group = None) -> bool:
        if self.pending:
            raise ValueError("unscale was called twice in a step")
        seen: set[int] = set()
        checks: list[torch.Tensor] = []
        device = None
        for p in parameters:
            device = device or p.device
            if id(p) in seen or p.grad is None:
                continue
            seen.add(id(p))
            g = p.grad.detach()
            divisor = torch.full((), self.scale, dtype=torch.float64, device=g.device)
            g.copy_(torch.div(g.double(), divisor))
            checks.append(torch.isfinite(g).all())
        if device is None:
            cuda = "nccl" in str(dist.get_backend(group))
            device = (
                torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
            )
        fine = torch.ones(1, dtype=torch.int32, device=device)
        for check in checks:
            fine *= check.to(torch.int32)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=group)
        self.pending.append(fine.item() == 1)
        return self.pending[0]

    def update(self) -> None:
        if not self.pending:
            raise ValueError("update without unscale")
        growth, backoff, interval, hysteresis, minimum = self.settings
        quiet, overflows = self.until
        if self.pending.pop():
            quiet, overflows = (quiet + 1, 0)
        else:
            quiet, overflows = (0, overflows + 1)
        if overflows >= hysteresis and self.scale > minimum:
            self.scale = max(minimum * 1.0, self.scale * backoff)
        if quiet >= interval:
            quiet = 0
            if self.scale * growth <= torch.finfo(torch.float32).max:
                self.scale *= growth
        self.until = [quiet, overflows]

    def state_dict(self) -> dict[str, float | int]:
        quiet, overflows = self.until
        return {"loss_scale": self.scale, "quiet": quiet, "bad": overflows}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = state["loss_scale"]
        self.until = [state["quiet"], state["bad"]]
        self.pending = []


def scaled_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float, bool]:
    limit = math.inf if max_norm is None else max_norm
    if math.isnan(limit) or limit <= 0:
        raise ValueError(f"max_norm {max_norm}")
    loss, counted = accumulate_and_reduce(model, window, loss_scale=scaler.scale, group=group)
    if not counted:
        return (0.0, 0.0, False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    stepped = scaler.unscale(iter(trainable), group=group)
    norm = clip_by_global_norm(trainable, limit)
    scaler.update()
    if stepped:
        for p in model.parameters():
            if not p.requires_grad:
                p.grad = None
        optimizer.step()
        model.write_back()
    return (loss, norm, stepped)
