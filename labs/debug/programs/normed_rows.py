"""A classifier with a batch norm is trained; each rank has rows of its own kind and number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS = (12, 4, 9, 6)  # of each rank in each step


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step over all rows, and norms of the first step's gradients."""
    torch.manual_seed(ctx.seed)
    model = nn.Sequential(
        nn.Linear(5, 12), code.SyncBatchNorm(12), nn.Tanh(), nn.Linear(12, 3)
    ).double()
    names = [f"{type(model[i]).__name__} {i}" for i in (0, 1, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    draw, rows = ctx.generator(), ROWS[: ctx.world_size]
    losses, norms = [], {}
    for step in range(10):
        inputs = torch.randn(rows[ctx.rank], 5, generator=draw, dtype=torch.float64) + 2 * ctx.rank
        targets = (inputs - 2 * ctx.rank)[:, :3].argmax(1)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            loss = F.cross_entropy(model(inputs), targets, reduction="sum") / sum(rows)
            loss.backward()
        parameters = [*model.parameters()]
        total = torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in parameters)])
        dist.all_reduce(total)
        own = total[1:].split([p.numel() for p in parameters])
        for p, grad in zip(parameters, own, strict=True):
            p.grad.copy_(grad.view_as(p))
        norms = norms or {name: model[int(name[-1])].weight.grad.norm().item() for name in names}
        optimizer.step()
        losses.append(total[0].item())
    return {"loss": losses, "norm of the first gradient": norms}
