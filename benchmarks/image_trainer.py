"""Throughput of the production trainer against the same model in a plain loop with torch's DDP.

Both train in the same ranks, some steps of each in turn, on the same decoded batches. The plain
loop does what a tutorial does: DistributedDataParallel, cross-entropy, an optimizer. The trainer
also counts readable images, asks whether to leave and measures every phase.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle

import torch
import torch._dynamo  # optimizers import it: here once, not in every rank
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext, run_ranks
from solutions.phase4_production.batches import Batch
from solutions.phase4_production.config_sources import make_config
from solutions.phase4_production.image_models import build_model
from solutions.phase4_production.image_task import normalised
from solutions.phase4_production.trainer_loop import Trainer

from .common import in_turn
from .pairs import Case, Paired, Start

# model, image size, images per step over all ranks, steps per measurement
CASES = (("small_cnn", 8, 64, 30), ("small_cnn", 32, 64, 8), ("resnet18", 64, 16, 2))
CPU = torch.device("cpu")
RATE = 0.01


def plain_step(model: str, size: int) -> Callable[[int, Batch], float]:
    """A step as in a tutorial."""
    net = DistributedDataParallel(build_model(model, 1000, size, 0))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)

    def step(number: int, batch: Batch) -> float:
        images = normalised(batch.inputs, CPU, False)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), batch.targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def trainer_step(trainer: Trainer) -> Callable[[int, Batch], float]:
    """A step of the trainer."""
    return lambda number, batch: trainer.train_step(number, [batch]).loss


def make_trainer(folder: str, model: str, size: int, batch: int, parallel: str) -> Trainer:
    """The trainer on drawn images, without checkpoints."""
    fields = {
        "data": "synthetic",
        "model": model,
        "image_size": size,
        "global_batch": batch,
        "base_lr": RATE,
        "base_batch": batch,
        "warmup_epochs": 0,
        "label_smoothing": 0,
        "parallel": parallel,
        "checkpoints": folder,
        "async_save": "false",
    }
    return Trainer(make_config(None, [f"--{n}={v}" for n, v in fields.items()]), CPU)


def compare(
    model: str,
    size: int,
    batch: int,
    steps: int,
    world_size: int,
    repeats: int,
    number: int = 0,
) -> dict[str, list[float]]:
    """Milliseconds of a step in each round, for the trainer (course, torch) and the plain loop."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())

            trainer = partial(make_trainer, folder, model, size, batch)
            loops = {
                "trainer": trainer_step(trainer("course")),
                "trainer on torch": trainer_step(trainer("torch")),
                "plain torch DDP": plain_step(model, size),
            }
            batches = cycle(random_batches(ctx.rank, size, batch // world_size))
            losses: dict[str, list[float]] = {name: [] for name in loops}

            def measure(name: str) -> Callable[[], float]:
                def taken() -> float:
                    dist.barrier()
                    begun = time.perf_counter()
                    for _ in range(steps):
                        losses[name].append(loops[name](len(losses[name]), next(batches)))
                    return (time.perf_counter() - begun) / steps * 1e3

                return taken

            contestants = {name: measure(name) for name in loops}
            in_turn(contestants, 1)  # buckets are made anew, memory is allocated
            return in_turn(contestants, repeats, number)

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def random_batches(rank: int, size: int, own_batch: int) -> list[Batch]:
    """Four batches of noise, different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = own_batch, 3, size, size
    return [
        Batch(
            torch.randint(256, shape, dtype=torch.uint8, generator=generator),
            torch.randint(1000, (own_batch,), generator=generator),
            [],
        )
        for _ in range(4)
    ]


def start(case: tuple[str, int, int, int], rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(compare(*case, 2, rounds, number))


PAIRED = Paired(
    title="The production trainer: a step on two ranks",
    labels=("model",),
    unit="ms",
    pairs=[("trainer", "plain torch DDP"), ("trainer on torch", "plain torch DDP")],
    cases=lambda: [
        Case((f"{case[0]}, {case[1]}×{case[1]}, batch {case[2]}",), partial(start, case))
        for case in CASES
    ],
    rounds=9,
    note="The trainer does three things more than the plain loop. It sends one small message per "
    "step, for exact means with unreadable images and for leaving together. It measures every "
    "phase. It reduces gradients from Python. Together they take a fixed part of a millisecond, "
    "which shows only for models as small as the first one.",
)
