"""The cost of an all-reduce, measured: three simple ones beside the backend's own.

A rank's clock shows when its call returns. At that moment the device and the other ranks may still
be at work. So a measurement of a collective has three rules. All ranks start together (a barrier).
The device is idle when the clock starts and done when it stops. The slowest rank's time counts.

For a tensor of N bytes on W ranks that takes t seconds:

===================  ==================  ==========================================================
name                 formula             tells
===================  ==================  ==========================================================
algorithm bandwidth  N/t                 how fast the caller's data is served
bus bandwidth        N/t · 2(W-1)/W      how fast the links are used, comparable at any world size
===================  ==================  ==========================================================

Bus bandwidth is a link's load only where a rank sends 2(W-1)/W bytes per byte of data, as in a
ring. The simple strategies send more: root and direct send W-1 bytes, the chain sends 2.

Cost: one barrier and the measured call per repeat, and at the end one all-reduce with 8 bytes per
repeat. Invariant: every rank returns the same number. The all-reduces themselves are in
``simple_allreduce``.

Source: nccl-tests' PERFORMANCE.md for bus bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from given.agreement import Group
from given.devices import CHOICES
from given.launched import launched
from given.parent import end_with_parent

from .simple_allreduce import STRATEGIES


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all work that it was given (CUDA runs behind the program)."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def time_collective(
    fn: Callable[[], object],
    *,
    warmup: int = 2,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
    sync: Callable[[torch.device | str], None] = synchronize,
) -> float:
    """Seconds that ``fn``, a collective call, takes: the same float on every rank of ``group``.

    ``fn`` runs ``warmup`` times untimed and ``repeats`` times timed. Before each timed run all
    ranks meet at a barrier. ``sync(device)`` is called right before the clock starts and again
    before it stops, so that work still queued on the device is counted where it belongs. A run
    takes as long as its slowest rank. The result is the median of the runs, because one disturbed
    run does not move it. With an even number of runs it is the mean of the two in the middle.
    """
    # --- exercise 1.9: start
    # Step 1: warm up: the first calls open connections and allocate
    # Step 2: per repeat: barrier, sync, start the clock, fn, sync, stop the clock
    # Step 3: the slowest rank's time of each repeat (all-reduce with MAX), then the median
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(repeats):
        dist.barrier(group=group)
        sync(device)
        begun = time.perf_counter()
        fn()
        sync(device)
        seconds.append(time.perf_counter() - begun)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return statistics.median(slowest.tolist())
    # --- exercise 1.9: end


def bandwidth(nbytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """(algorithm bandwidth, bus bandwidth) of an all-reduce of ``nbytes``, in bytes per second.

    Algorithm bandwidth is N/t: how fast the caller's data is served. Bus bandwidth multiplies it by
    2(W-1)/W, the bytes that a rank must send for each byte of data. So it is comparable with the
    speed of the links at any world size.
    """
    # --- exercise 1.9: start
    # Step 4: the two formulas
    algorithm = nbytes / seconds
    return algorithm, algorithm * 2 * (world_size - 1) / world_size
    # --- exercise 1.9: end


def communication_share(
    with_communication: Callable[[], object],
    without_communication: Callable[[], object],
    **timing: object,
) -> float:
    """The share (0 … 1) of a training step that communication costs.

    Times the step with and without communication by ``time_collective``, which gets ``timing``.
    Returns (t_with - t_without) / t_with, the same on every rank. If noise makes the difference
    negative, the result is 0.
    """
    # --- exercise 1.9: start
    # Step 5: time both, compare
    total = time_collective(with_communication, **timing)  # type: ignore[arg-type]
    alone = time_collective(without_communication, **timing)  # type: ignore[arg-type]
    return max(0.0, (total - alone) / total)
    # --- exercise 1.9: end


@dataclass(frozen=True)
class Row:
    """One measurement of an all-reduce; bandwidths in bytes per second."""

    strategy: str
    nbytes: int
    seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


def compare_strategies(
    sizes: Sequence[int],
    *,
    warmup: int = 2,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> list[Row]:
    """Time the three strategies and the backend's own all-reduce (``"backend"``) for each size.

    ``sizes`` are bytes of float32 elements. Each all-reduce is the sum of a tensor of that size
    over ``group``, timed by ``time_collective`` with ``warmup`` and ``repeats``. Returns a row per
    strategy and size, the same on every rank. Within each strategy the sizes keep their order.
    """
    # --- exercise 1.9: start
    # Step 6: for every strategy and size, time it on a tensor of that size and fill a row
    world_size = dist.get_world_size(group)
    rows = []
    for name, all_reduce in {**STRATEGIES, "backend": dist.all_reduce}.items():
        for nbytes in sizes:
            tensor = torch.ones(nbytes // 4, device=device)
            call = lambda f=all_reduce, t=tensor: f(t, group=group)
            seconds = time_collective(
                call, warmup=warmup, repeats=repeats, device=device, group=group
            )
            rows.append(Row(name, nbytes, seconds, *bandwidth(nbytes, seconds, world_size)))
    return rows
    # --- exercise 1.9: end


def plot_costs(rows: Sequence[Row], path: str | Path) -> None:
    """Write a picture of time over size, both axes logarithmic, one line per strategy.

    A legend names the lines, and the axes have labels with units: bytes, and s, ms, µs or ns. The
    ending of ``path`` chooses the format. No figure stays open.
    """
    # --- exercise 1.9: start
    # Step 7: one line per strategy, axes with units, a legend
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row.strategy for row in rows):
        line = [row for row in rows if row.strategy == name]
        sizes = [row.nbytes for row in line]
        axes.loglog(sizes, [row.seconds * 1e3 for row in line], marker="o", label=name)
    axes.set(xlabel="tensor size (bytes)", ylabel="time of one all-reduce (ms)")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    # --- exercise 1.9: end


def main() -> None:
    """Measure under torchrun, print a table on rank 0, write a picture on request."""
    end_with_parent()
    parser = argparse.ArgumentParser(description="Compare all-reduce strategies.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 * 10**k for k in range(1, 7)])
    parser.add_argument("--device", default="auto", choices=CHOICES)
    parser.add_argument("--plot", help="file for the picture, for example costs.png")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 4 "
            "-m solutions.phase1_data_parallel.collectives"
        )
    with launched("collectives", options.device, point_to_point=True) as rank:
        rows = compare_strategies(options.sizes, device=rank.device)
        if rank.rank == 0:
            print(f"{'strategy':10}{'bytes':>12}{'ms':>10}{'busbw MB/s':>12}")
            for row in rows:
                busbw = row.bus_bandwidth / 1e6
                print(f"{row.strategy:10}{row.nbytes:12,}{row.seconds * 1e3:10.3f}{busbw:12.1f}")
            if options.plot:
                plot_costs(rows, options.plot)


if __name__ == "__main__":
    main()
