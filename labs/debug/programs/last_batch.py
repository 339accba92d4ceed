"""Three steps; in the last one there are too few samples, and one rank has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    draw = ctx.generator()
    losses = []
    for size in (4, 4, 0 if ctx.rank == ctx.world_size - 1 else 2):
        inputs = torch.randn(size, 4, generator=draw, dtype=torch.float64)
        losses.append(code.train_step(model, optimizer, inputs, inputs[:, :3].argmax(1)))
    return {"loss": losses, "sum of the weights": model.weight.sum().item()}
