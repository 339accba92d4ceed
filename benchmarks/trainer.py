"""Training throughput: the trainer of phase 1 against the same loop under torch's DDP.

Both train in the same ranks, epoch by epoch in turn, on the same batches, and both report the
global loss of every step. DistributedDataParallel reduces buckets while backward still runs; the
trainer of phase 1 reduces everything afterwards in one message.
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
from torch.utils.data import DataLoader

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import build_model, digits
from solutions.phase1_data_parallel import trainer
from solutions.phase1_data_parallel.data_loader import build_loader

from .common import turns
from .pairs import Case, Paired, Start

BATCH = 128  # global; only the last does not divide evenly, and both leave it out
Step = Callable[[Tensor, Tensor], float]


def wide() -> nn.Module:
    """64-1024-1024-10: 1.1 million parameters, 4.5 MB of gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "digits MLP": lambda: build_model("mlp"),
    "digits CNN": lambda: build_model("cnn"),
    "wide MLP": wide,
}


def solution_step(model: nn.Module) -> Step:
    """One step of the trainer of phase 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return lambda inputs, targets: trainer.train_step(model, optimizer, inputs, targets)


def ddp_step(model: nn.Module) -> Step:
    """The same step under DistributedDataParallel."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        sums = torch.tensor([loss.item() * len(targets), len(targets)], dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    return step


def epoch(step: Step, loader: DataLoader[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """(ms per 1,000 samples of all ranks, last loss) of one epoch; starts together."""
    dist.barrier()
    begun, loss, seen = time.perf_counter(), 0.0, 0
    for inputs, targets in loader:
        if len(targets) * dist.get_world_size() < BATCH:
            break
        loss = step(inputs, targets)
        seen += BATCH
    return (time.perf_counter() - begun) / seen * 1e6, loss


def compare(model: str, world_size: int, epochs: int, number: int = 0) -> dict[str, list[float]]:
    """ms per 1,000 samples of each epoch after the first, for both."""

    def body(ctx: RankContext) -> dict[str, list[tuple[float, float]]]:
        loader = build_loader(
            digits(), rank=ctx.rank, world_size=ctx.world_size, global_batch_size=BATCH
        )
        steps = {"solution": solution_step(MODELS[model]()), "DDP": ddp_step(MODELS[model]())}
        values: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for at in range(epochs + 1):
            loader.batch_sampler.set_epoch(at)
            for name in turns(steps, 1, number + at):
                values[name].append(epoch(steps[name], loader))
        return values

    found = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    losses = [[loss for _, loss in found[name]] for name in ("solution", "DDP")]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=1e-3)  # same training
    return {name: [taken for taken, _ in values[1:]] for name, values in found.items()}


def start(model: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(compare(model, world_size, rounds, number))


PAIRED = Paired(
    title="Training on the digits, ms for 1,000 samples of all ranks",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "DDP")],
    cases=lambda: [
        Case((model, str(world_size)), partial(start, model, world_size))
        for model in MODELS
        for world_size in (2, 4)
    ],
    rounds=3,
    note=f"The trainer of phase 1 against torch's DDP, epoch by epoch. Global batch {BATCH}, SGD "
    "with momentum. Models this small mostly wait for messages. The solution sends two messages, "
    "one after the other, because ranks may have different numbers of samples and missing "
    "gradients. DDP assumes that neither happens. Phase 3 overlaps the messages with backward.",
)
