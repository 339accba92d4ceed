"""Six layers, each a unit of its own, are trained with sharded parameters and a clipped norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """Loss and norm of each step."""
    torch.manual_seed(ctx.seed)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    model = code.FSDP(nn.Sequential(*layers, nn.Linear(64, 8)), layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw = ctx.generator()
    losses, norms = [], []
    for step in range(6):
        inputs = torch.randn(16, 64, generator=draw)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            loss = (model(inputs) - inputs[:, :8]).square().mean()
            loss.backward()
            norms.append(float(code.clip_by_global_norm(model, 0.1)))
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "norm": norms}
