"""A small GPT, whose first and last layer share their weight, is split into stages of layers."""

from __future__ import annotations

from typing import Any

import torch

from distlab.reference.workloads import GPT


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the stage's weights at the end."""
    torch.manual_seed(ctx.seed)
    model = GPT(24, 8, 4, 16, 2)
    layers = code.layers_of(model)
    layers[-1].head.weight = layers[0].tokens.weight
    bounds = [len(layers) * r // ctx.world_size for r in range(ctx.world_size + 1)]
    stage = code.Stage(layers, bounds)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3, momentum=0.9)
    draw = torch.Generator().manual_seed(ctx.seed)
    losses = []
    for size in (6, 6, 6, 6, 6, 2):
        tokens = torch.randint(0, 24, (size, 9), generator=draw)
        losses.append(code.train_step(stage, optimizer, tokens[:, :-1], tokens[:, 1:].flatten()))
    total = sum(p.sum().item() for p in stage.parameters())
    return {"loss": losses, "sum of the stage's weights": total}
