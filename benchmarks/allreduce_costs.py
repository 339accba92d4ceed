"""Where the time of an all-reduce goes: additions and copies, the system's calls, wake-ups.

The system counts for each process how long its threads compute, how long the system works for them,
how often a thread waited and was woken, and how often a page of memory was touched for the first
time. ``python -m benchmarks.allreduce_costs`` prints the table.
"""

from __future__ import annotations

import resource
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.ring_allreduce import ring_all_reduce
from solutions.phase3_multi_node.segmented_ring import segmented_ring_all_reduce
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce

from .common import Table

RANKS, STARTS = 2, 7
SIZES = {4: 200, 400_000: 60, 4_000_000: 20, 20_000_000: 6}  # bytes, and calls that are counted


def bare_tree(tensor: Tensor) -> None:
    """The tree of two ranks without a line of Python that is not needed: no checks, no view."""
    group = dist.group.WORLD
    assert group is not None
    if group.rank():
        group.send([tensor], 0, 0).wait()
        group.recv([tensor], 0, 0).wait()
        return
    incoming = torch.empty_like(tensor)
    group.recv([incoming], 1, 0).wait()
    tensor.add_(incoming)
    group.send([tensor], 1, 0).wait()


CALLS = {
    "gloo": dist.all_reduce,
    "bare tree": bare_tree,
    "tree": tree_all_reduce,
    "halving, doubling": halving_doubling_all_reduce,
    "ring": ring_all_reduce,
    "segmented": segmented_ring_all_reduce,
}
COLUMNS = ("ms", "computing, ms", "in the system, ms", "wake-ups", "new pages")
Costs = list[float]  # of a call: as COLUMNS


def costs(ctx: RankContext) -> dict[tuple[int, str], Costs]:
    """What a call costs this rank, by bytes and contestant."""
    found = {}
    for nbytes, calls in SIZES.items():
        for name, all_reduce in CALLS.items():
            tensor = torch.zeros(nbytes // 4)
            for _ in range(3):  # opens connections, and takes memory that is kept
                all_reduce(tensor)
            dist.barrier()
            before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            for _ in range(calls):
                all_reduce(tensor)
            took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
            spent = [
                took * 1e3,
                (after.ru_utime - before.ru_utime) * 1e3,
                (after.ru_stime - before.ru_stime) * 1e3,
                after.ru_nvcsw - before.ru_nvcsw,
                after.ru_minflt - before.ru_minflt,
            ]
            found[nbytes, name] = [each / calls for each in spent]
    return found


def measure() -> Table:
    """Means over the ranks, medians over fresh starts."""
    starts = [run_ranks(costs, RANKS, ledger=False, timeout=120) for _ in range(STARTS)]
    rows = []
    for nbytes, name in starts[0][0]:
        means = [
            [statistics.mean(column) for column in zip(*(r[nbytes, name] for r in s), strict=True)]
            for s in starts
        ]
        medians = [statistics.median(column) for column in zip(*means, strict=True)]
        rows.append([f"{nbytes:,}", name, *(f"{each:.3g}" for each in medians)])
    return Table(
        "Where the time of an all-reduce goes",
        ("bytes", "", *COLUMNS),
        rows,
        f"Per call and rank, {RANKS} ranks, calls without a pause: means over the ranks, medians "
        f"of {STARTS} starts. All threads of a rank count, also those of gloo. A wake-up is a wait "
        "of a thread that ended. A new page is 4 KiB of memory that is touched for the first time. "
        "The bare tree sends what `tree` sends, without a check or a view: what `tree` takes "
        "longer is Python.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
