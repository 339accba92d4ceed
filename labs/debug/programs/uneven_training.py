"""A small classifier is trained for 12 steps; ranks have different numbers of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES = (9, 2, 5, 3)  # samples of each rank in each step


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed)
    layers = nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw = ctx.generator()
    losses = []
    for step in range(12):
        inputs = torch.randn(SIZES[ctx.rank], 6, generator=draw, dtype=torch.float64)
        inputs += ctx.rank  # data that is not alike on all ranks
        with ctx.region(f"step {step + 1}"):
            losses.append(code.train_step(model, optimizer, inputs, inputs[:, :3].argmax(1)))
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "sum of the weights": total}
