"""A whole layer and two layers that are cut over the ranks learn to copy a part of their input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the norm of the first layer's gradient in the first one."""
    torch.manual_seed(ctx.seed)
    whole = nn.Linear(6, 12).double(), nn.Linear(12, 4).double()
    first_layer = nn.Parameter(torch.eye(6, dtype=torch.float64))
    second, third = code.ColumnParallelLinear(whole[0]), code.RowParallelLinear(whole[1])
    parameters = [first_layer, *second.parameters(), *third.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    inputs = torch.randn(10, 6, dtype=torch.float64)
    losses, first_gradient = [], 0.0
    for step in range(10):
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            outputs = third(torch.tanh(second(inputs @ first_layer)))
            loss = F.mse_loss(outputs, inputs[:, :4] + 1)
            loss.backward()
        if first_layer.grad is not None and not step:
            first_gradient = first_layer.grad.norm().item()
        losses.append(loss.item())
        optimizer.step()
    return {"loss": losses, "norm of the first layer's gradient": first_gradient}
