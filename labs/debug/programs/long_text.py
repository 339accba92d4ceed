"""One attention layer learns a text of 96 characters by heart; each rank has a part of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

LENGTH, FEATURES, HEADS = 96, 24, 4


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step over the whole text, and norms of the first step's gradients."""
    draw = torch.Generator().manual_seed(ctx.seed)
    text = torch.randint(0, 10, (LENGTH + 1,), generator=draw)
    places = torch.randn(LENGTH, FEATURES, generator=draw, dtype=torch.float64)
    names = ("queries", "keys", "values", "head")
    shapes = [(FEATURES, FEATURES)] * 3 + [(FEATURES, 10)]
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    weights = [nn.Parameter(each / FEATURES**0.5) for each in drawn]
    optimizer = torch.optim.SGD(weights, lr=2.0)
    rows = code.own_positions([LENGTH], ctx.rank, ctx.world_size)
    targets = text[rows + 1].where(rows >= 0, -100)
    losses, norms = [], {}
    for step in range(10):
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            parts = (places[rows] @ w for w in weights[:3])
            heads = (part.unflatten(1, (HEADS, -1)).transpose(0, 1)[None] for part in parts)
            found = code.ring_attention(*heads, [LENGTH])
            logits = found[0].transpose(0, 1).flatten(1) @ weights[3]
            loss = F.cross_entropy(logits, targets, reduction="sum") / LENGTH
            loss.backward()
        total = torch.cat([loss.detach().view(1), *(w.grad.flatten() for w in weights)])
        dist.all_reduce(total)
        for w, grad in zip(weights, total[1:].split([w.numel() for w in weights]), strict=True):
            w.grad.copy_(grad.view_as(w))
        if not norms:
            norms = {n: w.grad.norm().item() for n, w in zip(names, weights, strict=True)}
        optimizer.step()
        losses.append(total[0].item())
    return {"loss": losses, "norm of the first gradient": norms}
