# alternative for: 1.9
"""One loop for warm-up and runs, a clock in nanoseconds, the backend measured first."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from solutions.phase1_data_parallel.collectives import Row, synchronize

from .simple_allreduce import STRATEGIES


def time_collective(fn, *, warmup=2, repeats=5, device="cpu", group=None, sync=synchronize):
    times = []
    for run in range(warmup + repeats):
        if run < warmup:
            fn()
            continue
        dist.barrier(group=group)
        sync(device)
        begun = time.perf_counter_ns()
        fn()
        sync(device)
        times.append((time.perf_counter_ns() - begun) / 1e9)
    longest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    ordered = sorted(longest.cpu().tolist())
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def bandwidth(nbytes, seconds, world_size):
    return nbytes / seconds, 2 * nbytes * (world_size - 1) / (world_size * seconds)


def communication_share(with_communication, without_communication, **timing):
    slow = time_collective(with_communication, **timing)
    fast = time_collective(without_communication, **timing)
    return 0.0 if slow <= fast else 1.0 - fast / slow


def compare_strategies(sizes, *, warmup=2, repeats=5, device="cpu", group=None):
    def call(name, tensor):
        if name == "backend":
            dist.all_reduce(tensor, group=group)
        else:
            STRATEGIES[name](tensor, op="sum", group=group)

    def measure(name, nbytes):
        tensor = torch.zeros((nbytes // 4,), device=device, dtype=torch.float32)
        seconds = time_collective(
            lambda: call(name, tensor), warmup=warmup, repeats=repeats, device=device, group=group
        )
        return Row(name, nbytes, seconds, *bandwidth(nbytes, seconds, dist.get_world_size(group)))

    return [measure(name, nbytes) for name in ["backend", *STRATEGIES] for nbytes in sizes]


def plot_costs(rows, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), dpi=120)
    try:
        for name in dict.fromkeys(row.strategy for row in rows):
            points = sorted((row.nbytes, 1e6 * row.seconds) for row in rows if row.strategy == name)
            axes.loglog(*zip(*points, strict=True), "s-", label=name)
        axes.set(xlabel="message size [bytes]", ylabel="time [µs]", title="cost of an all-reduce")
        axes.legend(title="strategy")
        figure.savefig(path)
    finally:
        plt.close(figure)
