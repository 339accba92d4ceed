# for: 2.1, 2.2, 2.3
"""Written from the docstrings alone."""

from __future__ import annotations

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


class _Windows(Iterator[list[T]]):
    def __init__(self, micro_batches: Iterable[T], steps: int) -> None:
        self.micro_batches, self.steps = (micro_batches, steps)
        self.source: Iterator[T] | None = None

    def __next__(self) -> list[T]:
        if self.source is None:
            self.source = iter(self.micro_batches)
        window: list[T] = []
        window.extend(islice(self.source, self.steps))
        if len(window) == 0:
            raise StopIteration
        return window


def _backward_one(model: nn.Module, inputs: Tensor, targets: Tensor, total: float) -> Tensor:
    losses = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED, reduction="none")
    loss = losses.sum()
    if loss.requires_grad:
        torch.autograd.backward(loss, torch.full_like(loss, 1.0 / total))
    return loss.detach().to(torch.float64)


def windows(micro_batches: Iterable[T], steps: int) -> Iterator[list[T]]:
    if not steps >= 1:
        raise ValueError("steps must be 1 or more")
    return _Windows(micro_batches, steps)


def accumulate(model: nn.Module, window: Iterable[MicroBatch], total: float) -> float:
    results = [_backward_one(model, *micro_batch, total) for micro_batch in window]
    return torch.stack(results).sum().item() if results else 0.0


def accumulate_and_reduce(
    model: nn.Module, window: Sequence[MicroBatch], *, loss_scale: float = 1.0, group: Group = None
) -> tuple[float, int]:
    flats: list[Tensor] = []
    views: list[tuple[nn.Parameter, Tensor]] = []
    trainable = [p for p in model.parameters() if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in trainable):
        alike = [p for p in trainable if p.dtype == dtype]
        flat = torch.zeros(sum(p.numel() for p in alike), dtype=dtype, device=alike[0].device)
        flats.append(flat)
        start = 0
        for p in alike:
            views.append((p, flat[start : start + p.numel()].view(p.shape)))
            p.grad = views[-1][1]
            start += p.numel()
    number = torch.zeros(1, dtype=torch.int64, device=trainable[0].device)
    for _, targets in window:
        number += targets.ne(IGNORED).sum()
    dist.all_reduce(number, op=dist.ReduceOp.SUM, group=group)
    total = number.item()
    mine = accumulate(model, window, max(total, 1) / loss_scale)
    loss = torch.full((1,), mine, dtype=torch.float64, device=trainable[0].device)
    dist.all_reduce(loss, group=group)
    for p, view in views:
        if p.grad is not None and p.grad is not view:
            view.copy_(p.grad)
        p.grad = view
    for flat in flats:
        dist.all_reduce(flat, group=group)
    if total == 0:
        return (0.0, 0)
    return (loss.item() / total, total)


def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    if not max_norm > 0:
        raise ValueError("max_norm must be greater than zero")
    known: dict[int, Tensor] = {}
    for p in parameters:
        if p.grad is not None:
            known[id(p)] = p.grad
    squares = [g.detach().to(torch.float64).square().sum() for g in known.values()]
    norm = torch.stack(squares).sum().item() ** 0.5 if squares else 0.0
    if norm > max_norm and norm != float("inf"):
        for g in known.values():
            g.detach().mul_(max_norm / norm)
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
    loss, counted = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)
    if not counted:
        return (0.0, 0.0)
    trainable = []
    for p in model.parameters():
        if p.requires_grad:
            p.grad.copy_(p.grad / loss_scale)
            trainable.append(p)
        else:
            p.grad = None
    norm = clip_by_global_norm(trainable, float("inf") if max_norm is None else max_norm)
    optimizer.step()
    return (loss, norm)
