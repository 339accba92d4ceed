"""All-reduce from messages (phase 3) against gloo's own, over sizes and world sizes.

All run in the same ranks, each after a barrier, and the slowest rank's time counts. The order
changes each round, because a run leaves its traces in caches and sockets. ``auto`` chooses by α and
β, which were fitted before to times measured by the same ranks. gloo's all-reduce is a segmented
ring in C++ on the same sockets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node import allreduce_choice
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.ring_allreduce import ring_all_reduce
from solutions.phase3_multi_node.segmented_ring import segmented_ring_all_reduce
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce

from .common import Table, now

WORLDS = (2, 3, 4)
SIZES = {4: 25, 4_000: 25, 400_000: 15, 4_000_000: 5, 20_000_000: 2, 100_000_000: 1}  # weights
COLUMNS = ("ring", "segmented", "tree", "halving, doubling", "auto")


def contestants(links: allreduce_choice.Links) -> dict[str, Callable[[Tensor], object]]:
    """The backend's own first, then ours."""
    calls = (
        ring_all_reduce,
        segmented_ring_all_reduce,
        tree_all_reduce,
        halving_doubling_all_reduce,
        lambda tensor: allreduce_choice.all_reduce(tensor, links=links),
    )
    return {dist.get_backend(): dist.all_reduce, **dict(zip(COLUMNS, calls, strict=True))}


def compare(
    world_size: int, sizes: Mapping[int, int], repeats: int, device: str = "cpu"
) -> list[tuple[int, dict[str, float], str]]:
    """For each size: median seconds by contestant, and the pattern that ``auto`` chose.

    ``sizes``: bytes, and a factor by which ``repeats`` is multiplied for this size.
    """

    def body(ctx: RankContext) -> list[tuple[int, dict[str, float], str]]:
        device, timings = ctx.device, allreduce_choice.measure
        links = allreduce_choice.fit(timings([*sizes], repeats=repeats, device=device))
        calls, out = contestants(links), []
        turns = random.Random(0)  # the same on all ranks
        for nbytes, weight in sizes.items():
            tensor = torch.empty(nbytes // 4, device=device)
            seconds = torch.zeros(1 + repeats * weight, len(calls), dtype=torch.float64)
            for run in seconds:  # the first warms up
                for index in turns.sample(range(len(calls)), len(calls)):
                    tensor.fill_(1.0)
                    dist.barrier()
                    begun = now(device)
                    [*calls.values()][index](tensor)
                    run[index] = now(device) - begun
                    assert tensor[-1] == ctx.world_size
            seconds = seconds.to(device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            medians = seconds[1:].median(0).values.tolist()
            chosen = allreduce_choice.choose(ctx.world_size, nbytes, links)
            out.append((nbytes, dict(zip(calls, medians, strict=True)), chosen))
        return out

    return list(run_ranks(body, world_size, ledger=False, timeout=300, device=device)[0])


def measure(repeats: int = 5) -> Table:
    """Ratios to gloo's time, by size and world size; ``repeats`` of the largest size."""
    rows = []
    for world_size in WORLDS:
        for nbytes, medians, chosen in compare(world_size, SIZES, repeats):
            gloo = medians.pop("gloo")
            ratios = [f"{seconds / gloo:.2f}" for seconds in medians.values()]
            ratios[-1] += f" ({chosen})"
            rows.append([str(world_size), f"{nbytes:,}", f"{gloo * 1e3:.3f}", *ratios])
    return Table(
        "All-reduce from messages, time relative to gloo's",
        ["ranks", "bytes", "gloo, ms", *COLUMNS],
        rows,
        "Medians of runs in the same ranks, in another order each round. The slowest rank's time "
        "counts; below 1 is faster than gloo. Goals: segmented at most 1.0 from 4 MB on, auto at "
        "most 1.5 "
        "below. A message costs about 20 µs of Python, which gloo's C++ does not pay: rings of "
        "short messages show it. At 4 MB a chunk stays one segment, because two segments cost "
        "more than the additions that they hide. With larger tensors both move their bytes "
        "through the same sockets.",
    )


if __name__ == "__main__":
    print(measure().markdown())
