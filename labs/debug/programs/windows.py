"""A classifier is trained by windows of 3 micro-batches, clipped to a norm of 0.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """Loss and norm of each step, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    draw = ctx.generator()
    losses, norms = [], []
    for step in range(8):
        window = []
        for size in (2 + ctx.rank, 5, 1):
            inputs = torch.randn(size, 6, generator=draw, dtype=torch.float64) + ctx.rank
            window.append((inputs, inputs[:, :3].argmax(1)))
        with ctx.region(f"step {step + 1}"):
            loss, norm = code.train_window(model, optimizer, window, max_norm=0.5)
        losses.append(loss)
        norms.append(norm)
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "norm": norms, "sum of the weights": total}
