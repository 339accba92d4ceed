"""One attention layer of twelve heads learns to copy its input; each rank has some positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LENGTH, FEATURES, HEADS = 24, 24, 12


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step over all positions, and the sum of the weights at the end."""
    draw = torch.Generator().manual_seed(ctx.seed)
    sequence = torch.randn(LENGTH, FEATURES, generator=draw, dtype=torch.float64)
    drawn = torch.randn(4, FEATURES, FEATURES, generator=draw, dtype=torch.float64)
    weights = nn.Parameter(drawn / FEATURES**0.5)
    optimizer = torch.optim.SGD([weights], lr=0.02)
    inputs = sequence.tensor_split(ctx.world_size)[ctx.rank]
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            parts = (inputs @ w for w in weights[:3])
            heads = (part.unflatten(1, (HEADS, -1)).transpose(0, 1)[None] for part in parts)
            found = code.all_to_all_attention(*heads)
            outputs = found[0].transpose(0, 1).flatten(1) @ weights[3]
            loss = (outputs - inputs).square().sum() / LENGTH
            loss.backward()
        total = torch.cat([loss.detach().view(1), weights.grad.flatten()])
        dist.all_reduce(total)
        weights.grad.copy_(total[1:].view_as(weights))
        optimizer.step()
        losses.append(total[0].item())
    return {"loss": losses, "sum of the weights": weights.sum().item()}
