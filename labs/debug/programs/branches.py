"""A model of two branches: each rank uses the second one in every other step only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The norm of both branches' gradients after each step."""
    torch.manual_seed(ctx.seed)
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}).double()

    class Sum(nn.Module):
        """The first branch, and the second where it is asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.branches = model

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            y = self.branches["first"](x)
            return (y + self.branches["second"](x) if both else y).square().mean()

    wrapped = code.BucketedDDP(Sum(), bucket_bytes=400, first_bucket_bytes=400)
    draw = ctx.generator()
    norms = []
    for step in range(6):
        wrapped.zero_grad()
        inputs = torch.randn(5, 8, generator=draw, dtype=torch.float64)
        wrapped(inputs, (step + ctx.rank) % 2 == 0 and step < 4).backward()
        norms.append(model["second"].weight.grad.norm().item())
    return {"norm of the second branch": norms}
