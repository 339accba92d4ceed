"""Three layers with 8-bit products; a step has two micro-batches, and the inputs become smaller."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step over all ranks, and the scales of the first layer after each."""
    torch.manual_seed(ctx.seed)
    widths = ((16, 24), (24, 24), (24, 4))
    layers = [code.Float8Linear(nn.Linear(*each), history=3) for each in widths]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw = ctx.generator()
    losses, scales = [], {"input": [], "weight": [], "gradient": []}
    for step in range(12):
        optimizer.zero_grad()
        mean = 0.0
        with ctx.region(f"step {step + 1}"):
            for size in (8, 2):
                inputs = torch.randn(8, 16, generator=draw) * size * (4.0 if step < 3 else 0.25)
                loss = (model(inputs) - inputs[:, :4].tanh()).square().mean() / 2
                loss.backward()
                mean += loss.item()
            finite = code.update_scales(model)
        total = torch.cat([torch.tensor([mean]), *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(total)
        total /= ctx.world_size
        own = total[1:].split([p.numel() for p in model.parameters()])
        for p, grad in zip(model.parameters(), own, strict=True):
            p.grad.copy_(grad.view_as(p))
        if finite:
            optimizer.step()
        losses.append(total[0].item())
        for name, scale in zip(scales, layers[0].scale_T.tolist(), strict=True):
            scales[name].append(scale)
    return {"loss": losses} | {f"scale of the first {name}": each for name, each in scales.items()}
