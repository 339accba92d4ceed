"""A classifier with two dropouts is trained for 12 steps; small outputs are kept for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 2000  # bytes


def dropped(x: Tensor) -> Tensor:
    """Dropout of one element in five."""
    return x * (torch.rand_like(x) < 0.8) / 0.8


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the weights at the end."""
    torch.manual_seed(ctx.seed)
    sizes = ((12, 16), (16, 320), (320, 4))
    first, second, last = (nn.Linear(*size).double() for size in sizes)
    parameters = [p for layer in (first, second, last) for p in layer.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    draw, losses = ctx.generator(), []
    torch.manual_seed(ctx.seed + 100 * ctx.rank)

    def layers(x: Tensor) -> Tensor:
        narrow = dropped(torch.tanh(first(x)))
        return torch.tanh(last(dropped(torch.tanh(second(narrow)))))

    for step in range(12):
        inputs = torch.randn(8, 12, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            outputs = code.selective_checkpoint(lambda each: each.nbytes <= SMALL, layers, inputs)
            loss = F.cross_entropy(outputs, inputs[:, :4].argmax(1))
            loss.backward()
            for p in parameters:
                dist.all_reduce(p.grad)
                p.grad /= ctx.world_size
        optimizer.step()
        losses.append(loss.item())
    total = sum(p.sum().item() for p in parameters)
    return {"loss": losses, "sum of the weights": total}
