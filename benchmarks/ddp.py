"""Phase 3's DDP against torch's DistributedDataParallel: time of a step, and memory.

Both train in the same ranks on the same batches, in turn, with gradients as views into their
buckets. Memory is what backward leaves alive, parameters and data aside: gradients and buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import GPT, build_model, digits
from solutions.phase3_multi_node.ddp import DDP

from .common import in_turn, now
from .pairs import Case, Paired, Start

Wrap = Callable[[nn.Module], nn.Module]


def mlp() -> nn.Module:
    """64-1024-…-1024-10 with eight square layers: 8.5 million parameters."""
    square = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), *square, nn.Linear(1024, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP, 8.5 M": mlp,
    "digits CNN": lambda: build_model("cnn"),
    "GPT, 4 layers": lambda: GPT(256, 64, layers=4, width=128, heads=4),
}
STEPS = {"MLP, 8.5 M": 1, "digits CNN": 15, "GPT, 4 layers": 3}  # in one timing
TORCHS = partial(DistributedDataParallel, gradient_as_bucket_view=True)
PAIRS: dict[str, tuple[Wrap, Wrap]] = {
    "every parameter used": (DDP, TORCHS),
    "unused ones found": (
        partial(DDP, agree=True),
        partial(TORCHS, find_unused_parameters=True),
    ),
}


def batch(model: str, rank: int) -> tuple[Tensor, Tensor]:
    """32 digits, or 4 texts of 64 tokens, for ``rank``."""
    if not model.startswith("GPT"):
        return digits()[32 * rank : 32 * rank + 32]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(256, (4, 65), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def wrapped(model: str, wrap: Wrap, device: torch.device | str = "cpu") -> nn.Module:
    """``model`` with the same weights each time, wrapped."""
    torch.manual_seed(0)
    return wrap(MODELS[model]().to(device))


def held(model: str, wrap: Wrap, inputs: Tensor, targets: Tensor) -> int:
    """Bytes that two backward passes leave alive, without the parameters."""
    with PeakMemory() as memory:
        net = wrapped(model, wrap, inputs.device)
        for _ in range(2):
            F.cross_entropy(net(inputs), targets).backward()
        time.sleep(0.05)  # threads of gloo let go of old buckets a little later
        return memory.current - sum(p.nbytes for p in net.parameters())


def stepper(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, inputs: Tensor, targets: Tensor
) -> Callable[[], float]:
    """Milliseconds of a training step, the mean of ``steps``; the ranks start together."""

    def measure() -> float:
        dist.barrier()
        begun = now(inputs.device)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
        return (now(inputs.device) - begun) / steps * 1e3

    return measure


def compare(
    model: str,
    pair: tuple[Wrap, Wrap],
    world_size: int,
    repeats: int,
    device: str = "cpu",
    number: int = 0,
) -> list[tuple[list[float], int]]:
    """For both of the pair: milliseconds of a step in each round, bytes that are held."""

    def body(ctx: RankContext) -> list[tuple[list[float], int]]:
        inputs, targets = batch(model, ctx.rank)
        data = inputs.to(ctx.device), targets.to(ctx.device)
        nets = [wrapped(model, wrap, ctx.device) for wrap in pair]
        contestants = {
            str(k): stepper(net, torch.optim.SGD(net.parameters(), lr=0.01), STEPS[model], *data)
            for k, net in enumerate(nets)
        }
        in_turn(contestants, 2)  # buckets are made anew after the first backward
        for mine, torchs in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-4)  # the same training
        taken = in_turn(contestants, repeats, number)
        return [(taken[str(k)], held(model, wrap, *data)) for k, wrap in enumerate(pair)]

    return run_ranks(body, world_size, ledger=False, timeout=300, device=device)[0]


def start(model: str, what: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    pair = PAIRS[what]
    (mine, held), (torchs, by_torch) = compare(model, pair, world_size, rounds, number=number)
    facts = {"MB": f"{held / 1e6:.2f}", "torch's MB": f"{by_torch / 1e6:.2f}"}
    return Start({"solution": mine, "torch DDP": torchs}, facts)


def cases() -> list[Case]:
    """Models, world sizes, and both ways to treat unused parameters."""
    return [
        Case((model, str(world_size), what), partial(start, model, what, world_size))
        for model in MODELS
        for world_size in (2, 4)
        for what in PAIRS
    ]


PAIRED = Paired(
    title="DDP: a training step, and MB of gradients and buckets",
    labels=("model", "ranks", ""),
    unit="ms",
    pairs=[("solution", "torch DDP")],
    facts=("MB", "torch's MB"),
    cases=cases,
    rounds=31,
    note="SGD. torch's DDP has gradient_as_bucket_view=True, and find_unused_parameters=True where "
    "the solution has agree=True. Both send the same buckets.",
)
