"""The host's own time for an operator, and how much ranks that compute beside it slow a rank down.

A program of small operators trains a model: forward, backward, the optimizer, and sums over the
gradients. Real time less the time of its kernels, which the virtual clock knows, is the host's. The
virtual clock also counts the operators of each phase, so the division is the one that a prediction
undoes. CPU time of the thread counts: other programs that take the core away do not.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it, and can't inside a dispatch mode
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..ranks import RankContext
from ..virtual.isolation import entered
from ..virtual.run import run_virtual
from .starts import starts

WIDTHS, BATCH, CLASSES = (40, 56, 24, 8), 24, 8
STEPS = 60
REPEATS = 40  # of what is timed beside company
LIMIT = 120.0  # seconds of a start
PHASES = ("forward", "backward", "optimizer", "")  # of the virtual clock; "" is the rest
Times = dict[str, list[float]]


def network() -> nn.Module:
    """Linear layers, a norm and tanh: 5,000 parameters."""
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(nn.LayerNorm(WIDTHS[0]), *layers)


def _train(ctx: RankContext, steps: int, device: str, virtual: bool) -> dict[str, float]:
    """Median seconds of each phase; on a virtual rank also "operators <phase>"."""
    clock = time.perf_counter if virtual else time.thread_time
    with torch.device(device):
        model = network()
    inputs = torch.empty(BATCH, WIDTHS[0], device=device).fill_(0.5)
    targets = torch.zeros(BATCH, dtype=torch.int64, device=device)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    taken: Times = {phase: [] for phase in PHASES}
    counted: dict[str, float] = {}
    for step in range(steps):
        if step == 1 and virtual:
            entered().mine.model.operators.clear()
        marks = [clock()]
        out = model(inputs)
        marks.append(clock())
        loss = F.cross_entropy(out, targets)
        between = clock()
        loss.backward()
        marks.append(clock())
        (sgd if step % 2 else adamw).step()
        marks.append(clock())
        _sums(list(model.parameters()))
        model.zero_grad()
        end = clock()
        rest = end - marks[3] + between - marks[1]  # the loss is no part of a module
        spans = (marks[1] - marks[0], marks[2] - between, marks[3] - marks[2], rest)
        for phase, seconds in zip(PHASES, spans, strict=True):
            taken[phase].append(seconds)
    if virtual:
        operators = entered().mine.model.operators
        counted = {f"operators {p}": operators[p] / (steps - 1) for p in PHASES}
    return {p: _typical(taken[p][1:]) for p in PHASES} | counted


def _typical(seconds: Sequence[float]) -> float:
    """The mean of the medians of odd and even steps, which have another optimizer."""
    return (statistics.median(seconds[::2]) + statistics.median(seconds[1::2])) / 2


def _sums(parameters: list[nn.Parameter]) -> None:
    """What programs do with gradients: copies, scales, a joined tensor, its parts."""
    parts = [p.grad.detach().flatten() * 0.5 for p in parameters if p.grad is not None]
    joined = torch.cat(parts)
    norm = joined.clone().mul_(joined).sum()
    torch.add(norm, 1.0)
    counts = [p.numel() for p in parameters]
    for p, own in zip(parameters, joined.split(counts), strict=True):
        p.grad = own.view_as(p)


def host_seconds(cluster: Path, steps: int, count: int) -> dict[str, float]:
    """Seconds per operator in each phase; the kernels of ``cluster`` must have a host of 0."""
    found = run_virtual(
        _train, 1, 9, "meta", True, cluster=cluster, compute="kernels", ledger=False
    )[0]
    real = starts(_train, 1, steps, "cpu", False, count=count, timeout=LIMIT)
    seconds = {p: statistics.median(one[p] for one in real) for p in PHASES}
    return {p: max(0.0, seconds[p] - found[p]) / found[f"operators {p}"] for p in PHASES}


def company(ranks: int, count: int) -> float:
    """How many times longer ranks compute if there are as many as cores, than one rank alone."""
    alone, together = (
        [statistics.median(same) for same in zip(*found, strict=True)]
        for found in (
            starts(_typical_compute, n, REPEATS, count=count, timeout=LIMIT) for n in (1, ranks)
        )
    )
    slower = [many / one for one, many in zip(alone, together, strict=True)]
    return max(1.0, statistics.geometric_mean(slower))


def _typical_compute(ctx: RankContext, repeats: int) -> list[float]:
    """Median CPU seconds of a product, of a sum that caches do not hold, of a training step."""
    a, long = torch.randn(160, 160), torch.randn(2**19)
    model = network()
    inputs, targets = torch.randn(BATCH, WIDTHS[0]), torch.zeros(BATCH, dtype=torch.int64)

    def step() -> Tensor:
        out = model(inputs)
        loss = F.cross_entropy(out, targets)
        loss.backward()
        return loss

    runs: list[Callable[[], object]] = [partial(torch.mm, a, a), partial(long.add_, long), step]
    found = []
    for run in runs:
        seconds = []
        dist.barrier()
        for _ in range(repeats):
            begun = time.thread_time()
            run()
            seconds.append(time.thread_time() - begun)
        found.append(statistics.median(seconds))
    return found
