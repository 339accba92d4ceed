"""Batch norm over all ranks, against PyTorch's own where it runs, and against autograd's.

``nn.SyncBatchNorm`` refuses tensors on a CPU in training. There the contestants are a layer of
PyTorch's parts (sums by ``torch.distributed.nn.functional.all_reduce``, the rest by autograd), and
``nn.BatchNorm2d`` on each rank's own rows, which sends nothing and computes something else. All
take the same steps in turn in the same ranks. Those that compute the same are compared first.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.sync_batch_norm import SyncBatchNorm

from .common import milliseconds, on_slowest_rank
from .pairs import Case, Paired, Start

SHAPES = ((8, 64, 32, 32), (8, 256, 8, 8), (64, 512))


class Plain(nn.Module):
    """The same layer by autograd: the sums travel as one differentiable all-reduce."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Mean and mean square of the group, weighted by the number of values."""
        dims, shape = [d for d in range(x.dim()) if d != 1], [-1] + [1] * (x.dim() - 2)
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = all_reduce(torch.cat([x.sum(dims), x.square().sum(dims), count]))
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        var, n = square - mean.square(), sums[-1].detach()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * n / (n - 1), 0.1)
        scale = (var + 1e-5).rsqrt() * self.weight
        return (x - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)


def contestants(channels: int, device: torch.device, dims: int) -> dict[str, nn.Module]:
    """The solution, what computes the same, and at last the layer that sends nothing."""
    layers: dict[str, nn.Module] = {
        "solution": SyncBatchNorm(channels),
        "autograd": Plain(channels),
    }
    if device.type == "cuda":
        layers["nn.SyncBatchNorm"] = nn.SyncBatchNorm(channels)
    own = nn.BatchNorm1d if dims == 2 else nn.BatchNorm2d
    layers["own rows"] = own(channels)
    return {name: layer.to(device) for name, layer in layers.items()}


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(x.detach().cos())
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def compare(
    shape: tuple[int, ...], world_size: int, repeats: int, number: int = 0
) -> dict[str, list[float]]:
    """Seconds of a step of each contestant in each round, on the slowest rank."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        layers = contestants(shape[1], ctx.device, len(shape))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
        same = [step(layer, x) for name, layer in layers.items() if name != "own rows"]
        for others in same[1:]:
            for mine, theirs in zip(same[0], others, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        calls = {name: partial(step, layer, x) for name, layer in layers.items()}
        on_slowest_rank(calls, 3, ctx.device)  # warms up
        return on_slowest_rank(calls, repeats, ctx.device, number)

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def start(shape: tuple[int, ...], world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(milliseconds(compare(shape, world_size, rounds, number)))


PAIRED = Paired(
    title="Batch norm over all ranks, one forward and backward",
    labels=("rows of a rank", "ranks"),
    unit="ms",
    pairs=[("solution", "autograd"), ("solution", "own rows")],
    cases=lambda: [
        Case(("×".join(map(str, shape)), str(world_size)), partial(start, shape, world_size))
        for shape in SHAPES
        for world_size in (2, 4)
    ],
    rounds=61,
    note="float32, the slowest rank's time. “autograd” is the same layer with a differentiable "
    "all-reduce. “own rows” is PyTorch's batch norm on each rank's rows alone: it sends nothing, "
    "and computes something else. `nn.SyncBatchNorm` runs on GPUs only.",
)
