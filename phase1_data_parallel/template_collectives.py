# Exercises 1.7, 1.8, 1.9: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase1.py 1.7
"""All-reduce from point-to-point messages, three ways, and what each costs.

All-reduce combines a tensor of N bytes over W ranks and leaves the result on every rank. From sends
and receives alone:

==========  ===============  ================  =================  ===============
strategy    messages in all  bytes in all      bytes sent by the  steps one after
                                               busiest rank       another
==========  ===============  ================  =================  ===============
root        2(W-1)           2(W-1) N          (W-1) N            2(W-1)
direct      W(W-1)           W(W-1) N          (W-1) N            W-1
chain       2(W-1)           2(W-1) N          2N (ends: N)       2(W-1)
ring        2W(W-1)          2(W-1) N          2(W-1)/W N         2(W-1)
==========  ===============  ================  =================  ===============

(For the direct exchange every step moves W messages at once, for the ring as well; phase 3 builds
the ring.) With latency α per message and β seconds per byte, steps one after another cost
steps·(α + message·β): the root is the bottleneck of the first, the network that of the second, the
length that of the third. A rank never sends before its partner can receive: sends and receives are
posted together, because a send may return only when it has been received.

Sources: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in
MPICH"; Patarasuk & Yuan 2009 for the lower bound 2(W-1)/W·N; nccl-tests' PERFORMANCE.md for bus
bandwidth.
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
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group
from given.parent import end_with_parent
from given.process_group import process_group

Op = Literal["sum", "mean", "max", "min", "product"]

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,  # divided at the end
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def check_op(tensor: Tensor, op: str) -> None:
    """Raise ValueError for an unknown ``op``, or the mean of integers, before anything is sent."""
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, not {op!r}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")


def all_reduce_root(tensor: Tensor, op: Op = "sum", root: int = 0, group: Group = None) -> None:
    """Combine ``tensor`` over the ranks of ``group`` through one root, in place on every rank.

    Everybody sends to ``root`` (a rank of the group), which combines in rank order and sends the
    result back. ``tensor`` may be empty or non-contiguous, of the same shape and dtype on all
    ranks. 2(W-1) messages of N bytes in all, by point-to-point calls only. Raises ValueError on
    every rank, before anything is sent, for an unknown ``op``, the mean of integers, or a root
    outside the group.
    """
    # Step 1: refuse bad arguments first, alike on all ranks
    # Step 2: every rank but the root sends its tensor (contiguous) and receives the result
    # Step 3: the root combines what it receives, in rank order, divides for the mean, and sends
    #         the result to everybody
    # Step 4: write the result into the caller's tensor, also when it is a strided view
    raise NotImplementedError("exercise 1.7")


def combine(values: Sequence[Tensor], op: str) -> Tensor:
    """All values combined in the order given; divided by their number for the mean."""
    result = values[0]
    for value in values[1:]:
        result = COMBINE[op](result, value)
    return result / len(values) if op == "mean" else result


def all_reduce_direct(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Everyone sends its tensor to everyone and combines for itself, in place.

    Same contract as ``all_reduce_root``, without a root: W(W-1) messages of N bytes in all, (W-1)N
    bytes sent per rank. All ranks combine in rank order, so the results are equal to the last bit.
    """
    # Step 1: post all receives and all sends at once (isend, irecv), into separate buffers
    # Step 2: wait for every handle before a buffer is read
    # Step 3: combine in rank order: floating-point sums depend on the order
    raise NotImplementedError("exercise 1.8")


def all_reduce_chain(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine along the chain 0 → 1 → … → W-1 and pass the result back the same way, in place.

    Same contract as ``all_reduce_root``, without a root: 2(W-1) messages of N bytes in all; each
    rank sends at most 2N, the ends N. Rank r adds its value to what ranks 0 … r-1 made.
    """
    # Step 4: receive from the left (not rank 0), combine, send to the right (not the last rank)
    # Step 5: the last rank holds everything; the result travels back to rank 0
    raise NotImplementedError("exercise 1.8")


STRATEGIES: dict[str, Callable[..., None]] = {
    "root": all_reduce_root,
    "direct": all_reduce_direct,
    "chain": all_reduce_chain,
}


@dataclass(frozen=True)
class Cost:
    """What an all-reduce of N bytes costs; ``max_bytes_per_rank`` is sent by the busiest rank."""

    messages: int
    total_bytes: float
    max_bytes_per_rank: float
    steps: int


def communication_cost(strategy: str, world_size: int, nbytes: int) -> Cost:
    """The module's table for ``"root"``, ``"direct"``, ``"chain"`` and, to compare, ``"ring"``.

    ``nbytes`` is the tensor's size N. One rank alone costs nothing. Raises ValueError for an
    unknown strategy.
    """
    # Step 6: write down the formulas; mind W = 1, and the chain of two, which has only ends
    raise NotImplementedError("exercise 1.8")


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done what was asked of it (CUDA runs behind the program)."""
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
    """Seconds that ``fn``, a collective call, takes: the same number on every rank.

    ``fn`` runs ``warmup`` times untimed and ``repeats`` times timed. Before each timed run all
    ranks meet at a barrier; ``sync(device)`` is called right before the clock starts and again
    before it stops, so that work still queued on the device is counted where it belongs. A run
    takes as long as its slowest rank; of the runs the median counts, which one disturbed run does
    not move.
    """
    # Step 1: warm up: the first calls open connections and allocate
    # Step 2: per repeat: barrier, sync, start the clock, fn, sync, stop the clock
    # Step 3: the slowest rank's time of each repeat (all-reduce with MAX), then the median
    raise NotImplementedError("exercise 1.9")


def bandwidth(nbytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """(algorithm bandwidth, bus bandwidth) of an all-reduce of ``nbytes``, in bytes per second.

    Algorithm bandwidth is N/t: how fast the caller's data is served. Bus bandwidth multiplies it by
    2(W-1)/W, the bytes a rank must send for each byte of data: comparable with the speed of the
    links at any world size.
    """
    # Step 4: the two formulas
    raise NotImplementedError("exercise 1.9")


def communication_share(
    with_communication: Callable[[], object],
    without_communication: Callable[[], object],
    **timing: object,
) -> float:
    """The share (0 … 1) of a training step that communication costs.

    Times the step with and without communication by ``time_collective`` (``timing`` goes there) and
    returns (t_with - t_without) / t_with, not below 0 when noise makes the difference negative.
    """
    # Step 5: time both, compare
    raise NotImplementedError("exercise 1.9")


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

    ``sizes`` are bytes (whole float32 elements). Returns a row per strategy and size, the same on
    every rank, sizes in the order given within each strategy.
    """
    # Step 6: for every strategy and size, time it on a tensor of that size and fill a row
    raise NotImplementedError("exercise 1.9")


def plot_costs(rows: Sequence[Row], path: str | Path) -> None:
    """Write a picture of time over size, both axes logarithmic, one line per strategy."""
    # Step 7: one line per strategy, axes with units, a legend
    raise NotImplementedError("exercise 1.9")


def main() -> None:
    """Measure under torchrun, print a table on rank 0, write a picture on request."""
    end_with_parent()
    parser = argparse.ArgumentParser(description="Compare all-reduce strategies.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 * 10**k for k in range(1, 7)])
    parser.add_argument("--plot", help="file for the picture, for example costs.png")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 4 "
            "-m solutions.phase1_data_parallel.collectives"
        )
    torch.set_num_threads(1)
    with process_group("gloo"):
        rows = compare_strategies(options.sizes)
        if dist.get_rank() == 0:
            print(f"{'strategy':10}{'bytes':>12}{'ms':>10}{'busbw MB/s':>12}")
            for row in rows:
                busbw = row.bus_bandwidth / 1e6
                print(f"{row.strategy:10}{row.nbytes:12,}{row.seconds * 1e3:10.3f}{busbw:12.1f}")
            if options.plot:
                plot_costs(rows, options.plot)


if __name__ == "__main__":
    main()
