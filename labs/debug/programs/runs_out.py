"""A small model is trained in two joins and then without one; the ranks' data end apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BATCHES = (3, 5, 4, 2)  # of each rank in each join


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The sum of the weights after each step, and what evaluation would use as the mean."""
    torch.manual_seed(ctx.seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    net = code.UnevenDDP(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    draw = ctx.generator()
    sums = []

    def batch() -> torch.Tensor:
        return torch.randn(7, 6, generator=draw, dtype=torch.float64) + ctx.rank

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        sums.append(sum(p.sum().item() for p in net.parameters()))

    for number in (1, 2):
        own = [batch() for _ in range(BATCHES[ctx.rank])]
        with ctx.region(f"join {number}"), net.join(own) as steps:
            for found in steps:
                if found is None:
                    net.shadow()
                else:
                    (net(found) - found[:, :2]).square().mean().backward()
                update()
    with ctx.region("without a join"):
        for inputs in (batch(), batch()):
            (net(inputs) - inputs[:, :2]).square().mean().backward()
            update()
    return {"sum of the weights": sums, "running mean": model[1].running_mean.sum().item()}
