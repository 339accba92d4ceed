"""Four layers, each a unit of its own, keep their rows on each rank; layer 1 is frozen at first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the change of each layer's rows on this rank since the start."""
    torch.manual_seed(ctx.seed)
    layers = [nn.Linear(12, 12).double() for _ in range(4)]
    net = [each for layer in layers for each in (layer, nn.Tanh())]
    layers[0].requires_grad_(False)
    model = code.PerParameterFSDP(nn.Sequential(*net), layers)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    draw = ctx.generator()
    losses = []
    for step in range(8):
        if step == 4:
            layers[0].requires_grad_(True)
        inputs = torch.randn(16, 12, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            loss = (model(inputs) - inputs.sin()).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = {name: (p - first[name]).abs().sum() for name, p in model.named_parameters()}
    change = {
        f"layer {k + 1}": sum(v.item() for name, v in moved.items() if f".{2 * k}." in name)
        for k in range(4)
    }
    return {"loss": losses, "change of the rows": change}
