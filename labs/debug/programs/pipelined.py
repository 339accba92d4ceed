"""A model of as many stages as ranks is trained with the 1F1B schedule, 16 micro-batches a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of this stage's gradients."""
    torch.manual_seed(ctx.seed)
    stages = [nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(ctx.world_size)]
    stages[-1] = nn.Sequential(nn.Linear(192, 6))
    schedule = code.make_schedule("1f1b", ctx.world_size, 16)
    boundary = torch.empty(32, 192, device="meta")
    stage = stages[ctx.rank]
    stages.clear()
    boundaries = [boundary] * (ctx.world_size - 1)
    pipeline = code.Pipeline([stage], schedule, nn.functional.cross_entropy, boundaries)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3)
    draw = torch.Generator().manual_seed(ctx.seed)
    losses, sums = [], []
    for step in range(5):
        inputs = torch.randn(512, 192, generator=draw)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            losses.append(pipeline.step(inputs, inputs[:, :6].argmax(1)))
        sums.append(sum(p.grad.abs().sum().item() for p in stage.parameters()))
        optimizer.step()
    return {"loss": losses, "sum of the stage's absolute gradients": sums}
