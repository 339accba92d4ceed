"""Two fragments take turns in rounds of 4 steps, and are received one step after they were sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss after each step on data of all ranks, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed + ctx.rank)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    parts = code.strided([model[0], model[2]], 2)
    settings = {"every": 4, "delay": 1, "mix": 0.25, "lr": 0.5, "momentum": 0.5, "bits": 32}
    rounds = code.StreamingDiLoCo(model, parts, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    common = torch.Generator().manual_seed(ctx.seed)
    seen = torch.randn(40, 6, generator=common, dtype=torch.float64)
    draw = ctx.generator()
    losses = []
    for _ in range(14):
        inputs = torch.randn(6, 6, generator=draw, dtype=torch.float64) + ctx.rank
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()
        rounds.step()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(seen), seen[:, :3].argmax(1))
        losses.append(loss.item())
    rounds.finish()
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "sum of the weights": total}
