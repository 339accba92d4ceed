"""A layer of six experts, two of them on each rank, learns to turn its tokens around."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SIZES = (12, 4, 9)  # tokens of each rank


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step over all ranks, and the norm of this rank's experts' gradients."""
    draw = torch.Generator().manual_seed(ctx.seed)
    up, down = (torch.randn(6, *shape, generator=draw) / 3 for shape in ((8, 12), (12, 8)))
    router = code.Router(8, 6, top_k=2, seed=ctx.seed)
    layer = code.ExpertParallel(router, up.requires_grad_(), down.requires_grad_())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    tokens = torch.randn(SIZES[ctx.rank], 8, generator=ctx.generator())
    losses, norms = [], []
    for step in range(8):
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            outputs, _ = layer(tokens)
            loss = (outputs + tokens).square().mean()
            loss.backward()
            code.divide_expert_gradients([layer.up, layer.down])
        mean = torch.cat([loss.detach().view(1), router.weight.grad.flatten()])
        dist.all_reduce(mean)
        mean /= ctx.world_size
        router.weight.grad.copy_(mean[1:].view_as(router.weight))
        norms.append(float(torch.stack([layer.up.grad.norm(), layer.down.grad.norm()]).norm()))
        optimizer.step()
        losses.append(mean[0].item())
    return {"loss": losses, "norm of the experts' gradients": norms}
