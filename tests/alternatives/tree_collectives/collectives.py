# alternative for: 1.9
"""Timing in one tensor, the median by sorting."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.collectives import Row, synchronize

from .simple_allreduce import STRATEGIES


def time_collective(fn, *, warmup=2, repeats=5, device="cpu", group=None, sync=synchronize):
    """The slowest rank of each repeat by an all-gather; median by sorting."""
    took = torch.zeros(repeats, dtype=torch.float64)
    for i in range(-warmup, repeats):
        if i >= 0:
            dist.all_reduce(torch.zeros(1), group=group)  # also a barrier
        sync(device)
        t0 = time.monotonic()
        fn()
        sync(device)
        if i >= 0:
            took[i] = time.monotonic() - t0
    everyone = [torch.zeros_like(took) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, took, group=group)
    ordered = torch.stack(everyone).amax(0).sort().values
    middle = repeats // 2
    pair = ordered[middle] + ordered[-1 - middle]
    return float(pair / 2)


def bandwidth(nbytes, seconds, world_size):
    return nbytes / seconds, nbytes / seconds * (2 - 2 / world_size)


def communication_share(with_communication, without_communication, **timing):
    slow, fast = (time_collective(f, **timing) for f in (with_communication, without_communication))
    return min(1.0, max(0.0, 1 - fast / slow))


def compare_strategies(sizes, *, warmup=2, repeats=5, device="cpu", group=None):
    rows = []
    w = dist.get_world_size(group)
    for nbytes in sizes:
        for name in ("root", "direct", "chain", "backend"):
            x = torch.zeros(nbytes // 4, device=device)
            reduce = STRATEGIES.get(name, dist.all_reduce)
            t = time_collective(
                lambda r=reduce, x=x: r(x, group=group),
                warmup=warmup,
                repeats=repeats,
                device=device,
                group=group,
            )
            rows.append(Row(name, nbytes, t, *bandwidth(nbytes, t, w)))
    return rows


def plot_costs(rows, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in sorted({r.strategy for r in rows}):
        points = [(r.nbytes, r.seconds) for r in rows if r.strategy == name]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("seconds")
    figure.legend()
    figure.savefig(path)
