"""What ranks of a prediction train: equal layers, some of which take their time in backward."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, machine_of
from .scene import Seen

FLOAT = 4  # bytes
MICRO = 1e-6
ADAM: dict[str, Any] = {
    "tolerance": 0.01,
    "why": "1 %: padding, and Adam's count of steps",
}
MODEL = (
    "W = {W} ranks train K = {K} layers of {D} x {D} float32 weights, without bias "
    "(P = {P:,} bytes)"
)


def layers(case: Case) -> nn.Sequential:
    """K linear layers of D × D float32 numbers, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = case["D"]
        return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(case["K"])))


def model_bytes(case: Case) -> int:
    """Bytes of the parameters of ``layers``."""
    return case["K"] * layer_bytes(case)


def layer_bytes(case: Case) -> int:
    """Bytes of one layer's parameters."""
    return case["D"] ** 2 * FLOAT


def drawn(exercise: str, random_: random.Random, **more: list[int]) -> Case:
    """A case with W ranks, K layers and width D; ``more``: what else to choose from."""
    cluster, spread = machine_of(random_)
    w = random_.choice([2, 3, 4, 6, 8])
    sizes = {"W": w, "K": random_.choice([4, 6, 8, 12]), "D": random_.choice([96, 144, 192])}
    sizes |= {name: random_.choice(values) for name, values in more.items()}
    return Case(exercise, cluster, sizes, spread)


def gradients(model: nn.Module) -> None:
    """Give every parameter a gradient."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def bucket_of(model: nn.Module) -> Any:
    """A bucket with all gradients of ``model``, as a communication hook gets it."""
    parameters = [*model.parameters()]
    flat = torch.arange(float(sum(p.numel() for p in parameters)))
    views = [
        part.view_as(p)
        for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    return SimpleNamespace(index=0, parameters=parameters, buffer=flat, views=views)


class Slowly(torch.autograd.Function):
    """Does nothing, and takes ``seconds`` for it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """The same values."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The same gradient, later."""
        time.sleep(ctx.seconds)
        return gradients[0], None


def first_start(seen: Seen) -> float:
    """Gradients that had come when the first bucket left, by the time that the ledger has."""
    begin = min(value["begin"] for value in seen.real)
    first = min(event.start for log in seen.logs for event in log.events)
    return float(round((first - begin) / (seen.case["t"] * MICRO)))


def waited_by_ledger(seen: Seen) -> float:
    """From the last gradient to the end of the last bucket."""
    begin = min(value["begin"] for value in seen.real)
    ends = [event.end or event.start for log in seen.logs for event in log.events]
    return max(ends) - begin - seen.case["K"] * seen.case["t"] * MICRO
