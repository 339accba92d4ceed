"""Each rank takes 4 steps of its own in a round; an outer optimizer brings them together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss after each step on data of all ranks, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed + ctx.rank)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    rounds = code.DiLoCo(model, every=4, lr=0.5, momentum=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
