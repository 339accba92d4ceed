"""Six wide layers are trained for 5 steps; gradients travel in buckets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the norm of all gradients after it."""
    torch.manual_seed(ctx.seed + ctx.rank)
    wide = [layer for _ in range(5) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = nn.Sequential(*wide, nn.Linear(256, 4))
    wrapped = code.BucketedDDP(model, bucket_bytes=600_000, first_bucket_bytes=300_000)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
    draw = ctx.generator()
    losses, norms = [], []
    for step in ctx.steps(5):
        inputs = torch.randn(64, 256, generator=draw)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            loss = F.cross_entropy(wrapped(inputs), inputs[:, :4].argmax(1))
            loss.backward()
        norms.append(sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "norm": norms}
