# for: 2.1, 2.2, 2.3
"""Written differently: a generator of windows, weighted means, one vector of gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

IGNORED = -100


def windows(micro_batches, steps):
    if steps <= 0:
        raise ValueError(f"a window needs at least one micro-batch, not {steps}")

    def cut():
        window = []
        for each in micro_batches:
            window.append(each)
            if len(window) == steps:
                yield window
                window = []
        if window:
            yield window

    return cut()


def accumulate(model, window, total):
    losses = []
    for inputs, targets in window:
        each = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED, reduction="none")
        each.backward(torch.full_like(each, 1 / total))
        losses.append(each.detach().double())
    return torch.cat(losses).sum().item() if losses else 0.0


def accumulate_and_reduce(model, window, *, loss_scale=1.0, group=None):
    model.zero_grad(set_to_none=True)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    facts = torch.zeros(1, dtype=torch.float64, device=device)
    for _, targets in window:
        facts += (targets != IGNORED).sum()
    dist.all_reduce(facts, group=group)
    total = int(facts)
    losses = accumulate(model, window, (total or 1) / loss_scale)
    per_dtype = {}
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            per_dtype.setdefault(p.dtype, []).append(p.grad)
    works = []
    for grads in per_dtype.values():
        flat = parameters_to_vector([g.contiguous() for g in grads])
        works.append((dist.all_reduce(flat, group=group, async_op=True), flat, grads))
    mine = torch.tensor([losses], dtype=torch.float64, device=device)
    dist.all_reduce(mine, group=group)
    for work, flat, grads in works:
        work.wait()
        vector_to_parameters(flat, grads)
    return float(mine) / (total or 1), total


def clip_by_global_norm(parameters, max_norm):
    if not max_norm > 0:
        raise ValueError(f"the limit must be positive, not {max_norm}")
    unique = {id(p): p for p in parameters}.values()
    norm = math.sqrt(sum((p.grad.double() ** 2).sum() for p in unique if p.grad is not None))
    if math.isfinite(norm) and norm > max_norm:
        for p in unique:
            if p.grad is not None:
                p.grad *= max_norm / norm
    return norm


def train_window(model, optimizer, window, *, max_norm=None, loss_scale=1.0, group=None):
    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)
    if total == 0:
        return 0.0, 0.0
    for p in model.parameters():
        if p.requires_grad:
            p.grad /= loss_scale
    trainable = [p for p in model.parameters() if p.requires_grad]
    norm = clip_by_global_norm(trainable, math.inf if max_norm is None else max_norm)
    optimizer.step()
    return loss, norm
