"""What the checks of exercises 3.13 and 3.14 train: awkward parameters, and equal ones to weigh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading import expect_close

LIMIT = 0.05  # of the gradient's norm, where it is clipped
BUCKET = 300  # bytes: several buckets, whose borders are inside of parameters


class Awkward(nn.Module):
    """Odd sizes, a single element, a tied, a frozen and an unused weight, one of one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 7)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        h = self.frozen(self.inside(x))
        y = self.head(self.scale * self.second(torch.tanh(self.first(h))))
        return y * self.sometimes if sometimes else y


def awkward(seed: int, device: torch.device | str = "cpu") -> Awkward:
    """The same on every rank; drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Awkward().to(device, torch.float64)


def groups_of(model: Awkward) -> list[dict]:
    """Two groups with different options."""
    biases = [p for p in model.parameters() if p.dim() < 2]
    weights = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]


def loss_of(model: nn.Module, seed: int, rank: int, step: int, device="cpu") -> Tensor:
    """Mean squared error of a rank's two samples; rank 0 alone uses ``sometimes``."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank * 100 + step)
    x, y = torch.randn(2, 5, generator=generator, dtype=torch.float64).to(device).split([3, 2], 1)
    return ((model(x, rank == 0) - y) ** 2).mean()


def mean_gradients(model: nn.Module, seed: int, world_size: int, step: int, device="cpu") -> None:
    """Add to ``grad`` the mean over the ranks, computed here for all of them."""
    losses = [loss_of(model, seed, rank, step, device) for rank in range(world_size)]
    (sum(losses) / world_size).backward()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], what: str, rank: int) -> None:
    """All parameters, those of the end first."""
    for name, value in reversed(want.items()):
        expect_close(got[name], value, what=f"{what}: {name}", rank=rank, rtol=1e-9, atol=1e-10)


class Equal(nn.Module):
    """Twelve matrices of one size: whole ones can be dealt out evenly to 2, 3 and 4 ranks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for layer in self.layers:
            nn.init.normal_(layer.weight, 0, width**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MATRIX = 4 * 32 * 32
WHOLE = 12 * MATRIX  # bytes of Equal's parameters


def traced(optimizer_type: Callable[..., torch.optim.Optimizer]) -> Callable[[Any], None]:
    """What a trace draws: two steps of twelve equal layers in four buckets."""

    def body(ctx: Any) -> None:
        model = Equal()
        optimizer = optimizer_type(model.parameters(), torch.optim.Adam, bucket_bytes=3 * MATRIX)
        for _ in ctx.steps(2):
            optimizer.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()

    return body
