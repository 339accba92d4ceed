"""All-reduce from messages (phase 3) against gloo's own, over sizes and world sizes.

All run in the same ranks, in another order each round (what ran before leaves its traces in caches
and sockets), each after a barrier; the slowest rank's time counts.
``auto`` chooses by α and β for the size, fitted to times that the same ranks measured before.
gloo's all-reduce is a segmented ring in C++ on the same sockets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node import allreduce_choice
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.ring_allreduce import ring_all_reduce
from solutions.phase3_multi_node.segmented_ring import segmented_ring_all_reduce
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce

from .common import milliseconds, now
from .pairs import Case, Paired, Start

WORLDS = (2, 3, 4)
SIZES = {4: 60, 4_000: 60, 400_000: 40, 4_000_000: 20, 20_000_000: 8, 100_000_000: 3}  # weights
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


def timed(largest: int, device: torch.device) -> list[allreduce_choice.Timing]:
    """Times of two sizes or more, up to the largest tensor: no line holds beyond them."""
    fitted = [nbytes for nbytes in SIZES if nbytes <= max(largest, 4_000)]
    short = [nbytes for nbytes in fitted if nbytes <= 4_000_000]
    timings = allreduce_choice.measure(short, repeats=25, device=device)
    return timings + allreduce_choice.measure(fitted[len(short) :], repeats=3, device=device)


def compare(
    world_size: int,
    sizes: Mapping[int, int],
    repeats: int,
    device: str = "cpu",
    number: int = 0,
) -> list[tuple[int, dict[str, list[float]], str]]:
    """For each size: seconds of each run by contestant, and the pattern that ``auto`` chose.

    ``sizes``: bytes, and how often as many runs as ``repeats`` are made of them.
    """

    def body(ctx: RankContext) -> list[tuple[int, dict[str, list[float]], str]]:
        device, out = ctx.device, []
        timings = timed(max(sizes), device)
        turns = random.Random(number)  # the same on all ranks
        for nbytes, weight in sizes.items():
            links = allreduce_choice.fit(allreduce_choice.for_size(timings, nbytes))
            calls = contestants(links)
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
            chosen = allreduce_choice.choose(ctx.world_size, nbytes, links)
            taken = seconds[1:].T.tolist()
            out.append((nbytes, dict(zip(calls, taken, strict=True)), chosen))
        return out

    return list(run_ranks(body, world_size, ledger=False, timeout=300, device=device)[0])


def start(world_size: int, nbytes: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    sizes = {nbytes: SIZES[nbytes]}
    ((_, taken, chosen),) = compare(world_size, sizes, rounds, number=number)
    values = milliseconds(taken)
    return Start(values, {"auto chose": chosen})


PAIRED = Paired(
    title="All-reduce from messages, against gloo's",
    labels=("ranks", "bytes"),
    unit="ms",
    pairs=[(name, "gloo") for name in COLUMNS],
    facts=("auto chose",),
    cases=lambda: [
        Case((str(world_size), f"{nbytes:,}"), partial(start, world_size, nbytes))
        for world_size in WORLDS
        for nbytes in SIZES
    ],
    rounds=4,
    note="The slowest rank's time, of runs in another order in each round. A message costs about "
    "20 µs of Python, which gloo's C++ does not pay. Rings of short messages show this cost. So "
    "at 4 MB a chunk stays one segment: two would cost more than the additions that they hide. "
    "With larger tensors both send their bytes through the same sockets.",
)
