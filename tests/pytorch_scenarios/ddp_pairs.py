"""A module in the course's DDP and in torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from solutions.phase3_multi_node.ddp import DDP
from tests.pytorch_scenarios.beside import (
    Pair,
    gradients,
    twins,
)


def both(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same module in the course's wrapper and in torch's."""
    ours, theirs = twins(make)
    return DDP(ours, agree=True), DistributedDataParallel(theirs, **options)


def after(make: Callable[[], nn.Module], step: Callable[[nn.Module], Any], **options: Any) -> Pair:
    """What ``step`` returns for both, and the gradients afterwards."""
    found = []
    for model in both(make, **options):
        returned = step(model)
        found.append([returned, gradients(model)])
    return found[0], found[1]


UNUSED = {"find_unused_parameters": True}


class Outputs(nn.Module):
    """Two layers whose results come in a container."""

    def __init__(self, container: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.container = container
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.container(self.a(x), self.b(x))
