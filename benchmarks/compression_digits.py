"""Bytes, time and accuracy of each compressor of phase 4: digits on two nodes with a slow link.

Two ranks, each on a node of its own, train an MLP of 300,000 parameters on the digits.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from distlab.netcluster import Network, cluster_obstacle
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import digits, epoch_order
from given.bucket_hooks import Hook
from solutions.phase3_multi_node.comm_hooks import all_reduce, bf16_compress
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase4_production.gradient_compression import RandomK, TopK
from solutions.phase4_production.powersgd import PowerSGD
from solutions.phase4_production.quantisation import Int8, OneBit

from .common import Table, spread

RATE = "100mbit"
RANKS, BATCH, EPOCHS, LR = 2, 64, 10, 0.1
WARM_UP = 5  # steps that are not timed


@dataclass(frozen=True)
class Compressor:
    """A hook for a model, and the momentum that is left to the optimizer."""

    hook: Callable[[nn.Module], Hook]
    momentum: float = 0.9
    lr: float = LR


COMPRESSORS = {
    "none": Compressor(lambda model: all_reduce),
    "bfloat16": Compressor(lambda model: bf16_compress),
    "int8": Compressor(lambda model: Int8()),
    "one bit": Compressor(lambda model: OneBit(model.parameters())),
    "random-K, 5 %": Compressor(lambda model: RandomK(model.parameters(), 0.05), momentum=0.0),
    "Top-K, 1 %": Compressor(
        lambda model: TopK(model.parameters(), 0.01, momentum=0.9), momentum=0.0
    ),
    "PowerSGD, rank 2": Compressor(lambda model: PowerSGD(model.parameters(), 2)),
}


@dataclass(frozen=True)
class Run:
    """One training: accuracy on the test images, bytes that a rank sends and seconds per step."""

    accuracy: float
    sent: float
    seconds: list[float]


def build(seed: int) -> nn.Module:
    """64-512-512-10 with ReLU: 300,554 parameters."""
    torch.manual_seed(seed)
    first, second = nn.Linear(64, 512), nn.Linear(512, 512)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(512, 10))


def train(chosen: Compressor, rate: str | None = None, seed: int = 0, epochs: int = EPOCHS) -> Run:
    """Train on two ranks. With ``rate`` they are on two nodes, and links have that speed."""
    images, labels = digits()[:]  # read once, before the ranks are forked
    test_images, test_labels = digits(train=False)[:]

    def body(ctx: RankContext) -> tuple[float, int, list[float]]:
        model = build(seed)
        net = DDP(model)
        net.register_comm_hook(chosen.hook(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=chosen.momentum)
        steps = len(images) // BATCH
        taken = []
        for epoch in range(epochs):
            order = epoch_order(len(images), seed, epoch)
            for step in range(steps):
                done = (epoch * steps + step) / (epochs * steps)
                optimizer.param_groups[0]["lr"] = chosen.lr * (0.5 + 0.5 * math.cos(math.pi * done))
                mine = order[step * BATCH : (step + 1) * BATCH][ctx.rank :: RANKS]
                begun = time.perf_counter()
                with ctx.region("steps"):
                    optimizer.zero_grad()
                    F.cross_entropy(net(images[mine]), labels[mine]).backward()
                    optimizer.step()
                taken.append(time.perf_counter() - begun)
        right = model(test_images).argmax(1) == test_labels
        return right.float().mean().item(), epochs * steps, taken[WARM_UP:]

    nodes = Network(RANKS, rate=rate) if rate else contextlib.nullcontext()
    with nodes as network:
        placed = {} if network is None else {"enter": network.placement((0, 1))}
        results = run_ranks(body, RANKS, timeout=120, **placed)
    accuracy, steps, taken = results[0]
    return Run(accuracy, results.logs[0].select(region="steps").sent / steps, taken)


def measure(repeats: int = 2) -> Table:
    """A row for each compressor; ``repeats``: trainings from different seeds."""
    obstacle = cluster_obstacle()
    rows, plain, plain_ms = [], 0.0, 0.0
    for name, chosen in COMPRESSORS.items():
        runs = [train(chosen, None, seed) for seed in range(repeats)]
        accuracy = statistics.mean(run.accuracy for run in runs)
        sent = runs[0].sent
        taken = train(chosen, RATE, epochs=1).seconds if obstacle is None else runs[0].seconds
        ms = [t * 1e3 for t in taken]
        plain, plain_ms = plain or sent, plain_ms or statistics.median(ms)
        gained = f"{plain_ms / statistics.median(ms):.1f}"
        row = [name, f"{sent:,.0f}", f"{plain / sent:.0f}", spread(ms, 1), gained]
        rows.append([*row, f"{100 * accuracy:.2f} %"])
    where = f"two nodes with links of {RATE[:-4]} Mbit/s" if obstacle is None else "one machine"
    return Table(
        "Compressors on the digits: bytes, time and accuracy",
        ["", "bytes per step", "times fewer", "ms per step", "times faster", "accuracy"],
        rows,
        f"An MLP of 300,554 parameters, {RANKS} ranks, {EPOCHS} epochs, cosine schedule, SGD with "
        "momentum 0.9. Top-K applies momentum before it chooses, and random-K has no momentum. "
        f"Accuracies are means of {repeats} seeds on 360 test images. Bytes are those that one "
        f"rank sends. Times are on {where}.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
