"""A classifier is trained with compressed gradients for 20 steps, with a restart after the 10th."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the weights at the end."""
    overlap = code.solution(3, "overlap")
    torch.manual_seed(ctx.seed)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    hook, draw, losses = None, ctx.generator(), []
    for step in range(20):
        if step % 10 == 0:
            saved = copy.deepcopy(hook.state_dict()) if hook else None
            model = copy.deepcopy(model)
            wrapped = overlap.BucketedDDP(model, bucket_bytes=3000, first_bucket_bytes=1000)
            hook = code.OneBit(model.parameters())
            if saved is not None:
                hook.load_state_dict(saved)
            wrapped.register_comm_hook(hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        inputs = torch.randn(8, 16, generator=draw, dtype=torch.float64)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            loss = F.cross_entropy(wrapped(inputs), inputs[:, :4].argmax(1))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "sum of the weights": total}
