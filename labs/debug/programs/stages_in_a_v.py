"""A model of two stages per rank, placed in a V, is trained with 12 micro-batches a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of this rank's gradients."""
    ranks = ctx.world_size
    torch.manual_seed(ctx.seed)
    stages = [nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(2 * ranks)]
    stages[-1] = nn.Sequential(nn.Linear(192, 6))
    mine = nn.ModuleList([stages[ctx.rank], stages[-1 - ctx.rank]])
    stages.clear()
    boundaries = [torch.empty(32, 192, device="meta")] * (2 * ranks - 1)
    schedule = code.solution(2, "pipeline_schedules").with_messages(code.zero_bubble_v(ranks, 12))
    pipeline = code.solution(2, "zero_bubble").ZeroBubblePipeline(
        list(mine), schedule, nn.functional.cross_entropy, boundaries
    )
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.3)
    draw = torch.Generator().manual_seed(ctx.seed)
    losses, sums = [], []
    for step in range(5):
        inputs = torch.randn(384, 192, generator=draw)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            losses.append(pipeline.step(inputs, inputs[:, :6].argmax(1)))
        sums.append(sum(p.grad.abs().sum().item() for p in mine.parameters()))
        optimizer.step()
    return {"loss": losses, "sum of the rank's absolute gradients": sums}
