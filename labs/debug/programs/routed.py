"""A router learns to share tokens out over six experts; each rank has another number of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SIZES = (40, 10, 25, 15)  # tokens of each rank
RATE = 0.02


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The mean balance loss of each step, and how many choices the busiest expert has."""
    router = code.Router(8, 6, top_k=2, seed=ctx.seed)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    tokens = torch.randn(SIZES[ctx.rank], 8, generator=ctx.generator()) + 0.3 * ctx.rank
    losses, busiest = [], []
    for step in range(10):
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            routing = router(tokens)
            routing.loss.backward()
        mean = torch.cat([routing.loss.detach().view(1), router.weight.grad.flatten()])
        dist.all_reduce(mean)
        mean /= ctx.world_size
        router.weight.grad.copy_(mean[1:].view_as(router.weight))
        optimizer.step()
        router.update_bias(RATE)
        losses.append(mean[0].item())
        busiest.append(float(routing.load_E.max()))
    return {"balance loss": losses, "choices of the busiest expert": busiest}
