"""Steps of the course's sharded optimizer and of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from distlab.ranks import RankContext
from solutions.phase3_multi_node.zero import ZeroOptimizer
from tests.pytorch_scenarios.beside import (
    Pair,
    inputs,
    mlp,
    twins,
)

Make = Callable[..., torch.optim.Optimizer]


BOTH: tuple[Make, Make] = (ZeroOptimizer, ZeroRedundancyOptimizer)


def average(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """What data parallelism leaves before a step."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def train(ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
        average(model)
        optimizer.step()


def of_both(work: Callable[[Make, nn.Module], Any]) -> Pair:
    """What ``work`` returns with the course's optimizer and with torch's."""
    found = [work(make, model) for make, model in zip(BOTH, twins(mlp), strict=True)]
    return found[0], found[1]


def whole_state(optimizer: Any) -> dict[str, Any]:
    """The state of all ranks on every rank."""
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.state_dict()
    optimizer.consolidate_state_dict(to=0)
    found = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]
