"""A training that is slow, or grows, for one reason. It runs under the profiler:

    torchrun --nproc-per-node 2 -m given.slow_run 7 --out runs/slow

The seed, here 7, chooses reason and sizes. Each rank writes its profile into a folder of its own,
``runs/slow/rank0`` and so on. Read the files before you read this program: they tell the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from given.launched import launched
from given.parent import end_with_parent
from given.profiled import WARMUP, profiled

REASONS = ("compute", "communication", "data", "optimizer", "launch", "memory")
WIDTH, ROWS = 256, 128  # of a batch: its compute is most of a healthy step on a CPU
MIB = 2**20


class Samples(Dataset[Tensor]):
    """Random rows; each takes ``seconds`` to read."""

    def __init__(self, count: int, seconds: float) -> None:
        self.rows = torch.randn(count, WIDTH)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        if self.seconds:  # to sleep 0 s gives the core away
            time.sleep(self.seconds * len(indices))
        return [self.rows[indices]]


def decay(rate: float, terms: int = 800) -> float:
    """(1 - rate^terms), summed term by term in Python."""
    return (1 - rate) * math.fsum(rate**k for k in range(terms))


class Model(nn.Module):
    """Layers of one width. ``small``: so many small parameters besides; ``by_row``: so many rows
    are scaled one by one."""

    def __init__(self, small: int, by_row: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.small = nn.ParameterList(torch.zeros(WIDTH) for _ in range(small))
        self.by_row = by_row

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.small:
            x = x + torch.stack(list(self.small)).sum(0)
        rows = [row * decay(0.99) for row in x[: self.by_row]]
        return torch.cat([torch.stack(rows), x[self.by_row :]]) if rows else x


class PerTensor(torch.optim.SGD):
    """Goes from tensor to tensor, and computes a correction in Python for each."""

    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=1e-4 * decay(0.9) * decay(0.999))


def train(reason: str, draw: random.Random, steps: int, folder: Path) -> None:
    """The steps of one rank, with the ``reason`` in them."""
    small = draw.randint(30, 40) if reason == "optimizer" else 0
    by_row = draw.randint(60, 80) if reason == "launch" else 0
    slow = draw.uniform(3e-4, 5e-4) if reason == "data" else 0.0
    gathered = draw.randint(24, 32) * MIB if reason == "communication" else 4096
    kept = draw.randint(1, 3) * MIB if reason == "memory" else 0
    model = Model(small, by_row)
    kind = PerTensor if small else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-4)
    samples = Samples((WARMUP + steps) * ROWS, slow)
    mine = torch.ones(gathered // 4)  # what all ranks need of this one
    every = torch.empty(dist.get_world_size() * len(mine))
    history = []
    with profiled(folder, steps) as profiler:
        for x in DataLoader(samples, batch_size=ROWS, collate_fn=lambda batches: batches[0]):
            gather = dist.all_gather_into_tensor(every, mine, async_op=True)
            if reason == "communication":
                gather.wait()
            model.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
            gather.wait()
            if kept:
                history.append(torch.zeros(kept // 4))
            profiler.step()


def main() -> None:
    """The command line, on each rank."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int, help="chooses the reason and the sizes")
    parser.add_argument("--reason", choices=REASONS, help="choose it yourself")
    parser.add_argument("--out", type=Path, default=Path("runs/slow"), help="default: runs/slow")
    parser.add_argument("--steps", type=int, default=4, help="in the profile; default: 4")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node 2 -m given.slow_run 7")
    draw = random.Random(options.seed)
    reason = draw.choice(REASONS)
    with launched("slow_run", "cpu") as rank:
        torch.manual_seed(rank.rank)
        folder = options.out / f"rank{rank.rank}"
        train(options.reason or reason, draw, options.steps, folder)
        if rank.rank == 0:
            print(folder / "trace.json.gz")


if __name__ == "__main__":
    main()
