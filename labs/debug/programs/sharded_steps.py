"""Twelve equal layers are trained with a sharded optimizer state; the learning rate falls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, the sum of the weights, and bytes of optimizer state on this rank."""
    torch.manual_seed(ctx.seed)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(12)))
    optimizer = code.ZeroOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, bucket_bytes=40_000
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
    inputs = torch.randn(16, 48, generator=torch.Generator().manual_seed(ctx.seed))
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        with ctx.region(f"step {step + 1}"):
            optimizer.step()
        schedule.step()
        losses.append(loss.item())
    state = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if torch.is_tensor(value)
    )
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "sum of the weights": total, "bytes of optimizer state": state}
