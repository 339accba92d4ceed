# for: 2.1, 2.2, 2.3
"""Written from the docstrings alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

T = TypeVar("T")
MicroBatch = tuple[Tensor, Tensor]
IGNORED = -100


def windows(micro_batches: Iterable[T], steps: int) -> Iterator[list[T]]:
    if steps < 1:
        raise ValueError(f"a window needs at least one micro-batch, not {steps}")

    def divided() -> Iterator[list[T]]:
        source = iter(micro_batches)
        while window := list(islice(source, steps)):
            yield window

    return divided()


def accumulate(model: nn.Module, window: Iterable[MicroBatch], total: float) -> float:
    loss_sum: Tensor | float = 0.0
    for inputs, targets in window:
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        if loss.requires_grad:
            (loss / total).backward()
        loss_sum = loss_sum + loss.detach().double()
        del logits, loss
    return float(loss_sum)


def accumulate_and_reduce(
    model: nn.Module, window: Sequence[MicroBatch], *, loss_scale: float = 1.0, group: Group = None
) -> tuple[float, int]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = None
    device = parameters[0].device
    count = torch.zeros((), dtype=torch.int64, device=device)
    for _, targets in window:
        count += torch.count_nonzero(targets != IGNORED)
    dist.all_reduce(count, group=group)
    total = int(count)
    local_loss = accumulate(model, window, max(total, 1) / loss_scale)
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in parameters:
        by_dtype.setdefault(p.dtype, []).append(p)
    for alike in by_dtype.values():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        flat = torch.cat([g.detach().reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        for p, g, piece in zip(
            alike, gradients, flat.split([p.numel() for p in alike]), strict=True
        ):
            g.copy_(piece.view(p.shape))
            p.grad = g
    loss_sum = torch.tensor(local_loss, dtype=torch.float64, device=device)
    dist.all_reduce(loss_sum, group=group)
    return (float(loss_sum) / total, total) if total else (0.0, 0)


def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    if not max_norm > 0:
        raise ValueError(f"the limit of the norm must be positive, not {max_norm}")
    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]
    norms = [torch.linalg.vector_norm(g.detach(), dtype=torch.float64) for g in gradients]
    norms = torch.stack(norms).tolist() if norms else []
    norm = math.hypot(*norms)
    if any(math.isnan(n) for n in norms):
        norm = math.nan
    if max_norm < norm < math.inf:
        factor = max_norm / norm
        with torch.no_grad():
            for g in gradients:
                g.mul_(factor)
    return norm


def train_window(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    loss_scale: float = 1.0,
    group: Group = None,
) -> tuple[float, float]:
    if max_norm is not None and (not max_norm > 0):
        raise ValueError(f"the limit of the norm must be positive, not {max_norm}")
    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)
    if total == 0:
        return (0.0, 0.0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if loss_scale != 1.0:
        for p in parameters:
            p.grad.div_(loss_scale)
    norm = clip_by_global_norm(parameters, math.inf if max_norm is None else max_norm)
    frozen = [(p, p.grad) for p in model.parameters() if not p.requires_grad]
    for p, _ in frozen:
        p.grad = None
    try:
        optimizer.step()
    finally:
        for p, old in frozen:
            p.grad = old
    return (loss, norm)
