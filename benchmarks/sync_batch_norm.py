"""Batch norm over all ranks, against PyTorch's own where it runs, and against autograd's.

``nn.SyncBatchNorm`` refuses tensors on a CPU in training. There the contestants are a layer of
PyTorch's parts (sums by ``torch.distributed.nn.functional.all_reduce``, the rest by autograd), and
``nn.BatchNorm2d`` on each rank's own rows, which sends nothing and computes something else. All
take the same steps in turn in the same ranks. Those that compute the same are compared first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.sync_batch_norm import SyncBatchNorm

from .common import Table, in_turn, now, spread

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


def timed(layer: nn.Module, x: Tensor) -> Callable[[], float]:
    """Milliseconds of a forward and backward; the ranks start together."""

    def measure() -> float:
        dist.barrier()
        begun = now(x.device)
        step(layer, x)
        return (now(x.device) - begun) * 1e3

    return measure


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of one forward and backward."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(x.detach().cos())
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def compare(shape: tuple[int, ...], world_size: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each contestant in each round, on the slowest rank."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        layers = contestants(shape[1], ctx.device, len(shape))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
        same = [step(layer, x) for name, layer in layers.items() if name != "own rows"]
        for others in same[1:]:
            for mine, theirs in zip(same[0], others, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
        measures = {name: timed(layer, x) for name, layer in layers.items()}
        in_turn(measures, 3)
        taken = torch.tensor(list(in_turn(measures, repeats).values()), device=ctx.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return dict(zip(measures, taken.tolist(), strict=True))

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def measure(repeats: int = 31) -> Table:
    """Step time side by side."""
    rows = []
    for shape in SHAPES:
        for world_size in (2, 4):
            taken = compare(shape, world_size, repeats)
            ours, own = taken.pop("solution"), taken.pop("own rows")
            for name, theirs in taken.items():
                ratio = statistics.median(ours) / statistics.median(theirs)
                first = ["×".join(map(str, shape)), str(world_size), spread(ours), name]
                rows.append([*first, spread(theirs), f"{ratio:.2f}", spread(own)])
    return Table(
        "Batch norm over all ranks: milliseconds of one forward and backward",
        [
            "rows of a rank",
            "ranks",
            "phase 2 solution",
            "beside it",
            "its time",
            "ratio",
            "own rows",
        ],
        rows,
        f"float32. Median (least … most) of {repeats}, taken in turn in the same ranks, of the "
        "slowest rank. “autograd” is the same layer with a differentiable all-reduce. “own rows” "
        "is PyTorch's batch norm on each rank's rows alone. `nn.SyncBatchNorm` runs on GPUs only.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
