"""FSDP of phase 3 against torch's ``fully_shard``: time of a step and peak memory, taken in turn.

Both shard the same units, prefetch and train on the same batches with AdamW in the same ranks. Peak
memory is that of all tensors alive during a step, the sharded state included (``PeakMemory``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import GPT
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP

from .common import milliseconds, now, turns
from .pairs import Case, Paired, Start

STEPS = 2  # per turn
Step = Callable[[], float]
Parts = tuple[nn.Module, list[nn.Module], Tensor, Tensor]


def wide() -> Parts:
    """64-1024-…-10 with eight square layers: 8.5 million parameters, 34 MB."""
    hidden = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(nn.Linear(64, 1024), *hidden, nn.Linear(1024, 10))
    return model, list(hidden), torch.randn(64, 64), torch.randint(0, 10, (64,))


def tiny_gpt() -> Parts:
    """4 layers of width 256: 3.4 million parameters, 13 MB."""
    model = GPT(256, 64, 4, 256, 4)
    tokens = torch.randint(0, 256, (4, 64))
    return model, list(model.blocks), tokens, tokens.flatten()


MODELS = {"MLP": wide, "tiny GPT": tiny_gpt}


def made(name: str, device: torch.device) -> Parts:
    """The model, its units and a batch, with the same numbers each time."""
    torch.manual_seed(0)
    model, units, inputs, targets = MODELS[name]()
    return model.to(device), units, inputs.to(device), targets.to(device)


def train_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """One step of AdamW; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(name: str, device: torch.device) -> Step:
    """The solution of exercises 3.15 and 3.16."""
    model, units, *batch = made(name, device)
    return train_step(PrefetchFSDP(model, units), *batch)


def torchs(name: str, device: torch.device) -> Step:
    """torch's FSDP2."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, units, *batch = made(name, device)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not units[-1])
    fully_shard(model, mesh=mesh)
    return train_step(model, *batch)


Make = Callable[[str, torch.device], Step]
CONTESTANTS: dict[str, Make] = {"solution": ours, "fully_shard": torchs}


def compare(
    name: str,
    world_size: int,
    repeats: int,
    device: str = "cpu",
    number: int = 0,
    contestants: dict[str, Make] = CONTESTANTS,
) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds per step of each turn, and peak bytes of a rank, for both."""

    def body(ctx: RankContext) -> tuple[dict[str, list[float]], list[int], list[list[float]]]:
        peaks = []
        for make in contestants.values():
            with PeakMemory() as memory:
                step = make(name, ctx.device)
                step()
                memory.peak = memory.current
                step()
            peaks.append(memory.peak)
            del step
        steps = {who: make(name, ctx.device) for who, make in contestants.items()}
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        losses = [[step() for _ in range(STEPS)] for step in steps.values()]  # also warms up
        for who in turns(steps, repeats, number):
            dist.barrier()
            begun = now(ctx.device)
            for _ in range(STEPS):
                steps[who]()
            seconds[who].append((now(ctx.device) - begun) / STEPS)
        return seconds, peaks, losses

    found = run_ranks(body, world_size, ledger=False, timeout=300, device=device)
    seconds, peaks, losses = found[0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-3)  # same training
    return seconds, peaks


def start(
    name: str, world_size: int, contestants: dict[str, Make], rounds: int, number: int
) -> Start:
    """One start of the ranks."""
    seconds, peaks = compare(name, world_size, rounds, number=number, contestants=contestants)
    facts = dict(zip(PEAKS, (f"{peak / 1e6:.1f}" for peak in peaks), strict=True))
    return Start(milliseconds(seconds), facts)


def cases(contestants: dict[str, Make] = CONTESTANTS) -> list[Case]:
    """Each model on 2 and on 4 ranks."""
    return [
        Case((name, str(world_size)), partial(start, name, world_size, contestants))
        for name in MODELS
        for world_size in (2, 4)
    ]


PEAKS = ("solution, peak MB", "torch, peak MB")
PAIRED = Paired(
    title="FSDP: a training step, and peak memory",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "fully_shard")],
    facts=PEAKS,
    cases=cases,
    rounds=5,
    note=f"AdamW, a unit per hidden layer or block, prefetching; rounds of {STEPS} steps. The "
    "solution gathers a flat vector and uses it where it is. torch shards every parameter, and "
    "copies into and out of its messages. The peak is in backward, and is the same for both: "
    "shards, one unit ahead, one vector of gradients.",
)
