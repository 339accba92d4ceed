"""All-reduce between two nodes on this machine: hierarchical against gloo's flat ring.

The nodes' links are shaped (``distlab.netcluster``). Both run in the same ranks in turn; the
slowest rank's time counts. The bytes are those that the interface of a node counted.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from distlab.netcluster import Network, bytes_sent, cluster_obstacle
from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node import topology
from solutions.phase3_multi_node.hierarchical_allreduce import (
    all_reduce_hierarchical,
    bytes_leaving_a_node,
)

from .common import turns
from .pairs import Case, Paired, Start

RATE = "200mbit"
SIZES = (1_000_000, 10_000_000)
# the node of each rank
PLACEMENTS = {
    "2 + 2 ranks": (0, 0, 1, 1),
    "2 + 2 ranks, dealt out in turn": (0, 1, 0, 1),
    "3 + 1 ranks": (0, 0, 0, 1),
}
TITLE = f"All-reduce between two nodes with links of {RATE}"
Sample = tuple[float, int]  # seconds of the slowest rank, most bytes that left a node


def groups_of(placement: tuple[int, ...]) -> topology.NodeGroups:
    """The groups of ranks in this placement."""
    places = [
        topology.Place(f"node{node}", node, Counter(placement[:rank])[node])
        for rank, node in enumerate(placement)
    ]
    return topology.make_groups(topology.topology_of(places))


def compare(
    placement: tuple[int, ...], nbytes: int, repeats: int, number: int = 0
) -> dict[str, list[Sample]]:
    """The samples of both, taken in turn on fresh nodes."""

    def body(ctx: RankContext) -> dict[str, list[list[float]]]:
        groups, tensor = groups_of(placement), torch.ones(nbytes // 4)
        contestants: dict[str, Callable[[], object]] = {
            "gloo": lambda: dist.all_reduce(tensor),
            "solution": lambda: all_reduce_hierarchical(tensor, groups, "mean"),
        }
        samples: dict[str, list[list[float]]] = {name: [] for name in contestants}
        for name in turns(contestants, repeats + 1, number):
            tensor.fill_(1.0)
            dist.barrier()
            before, begun = bytes_sent(), time.perf_counter()
            contestants[name]()
            seconds = time.perf_counter() - begun
            dist.barrier()
            samples[name].append([seconds, bytes_sent() - before])
            assert tensor[-1] == (1 if name == "solution" else ctx.world_size)
        return {name: values[1:] for name, values in samples.items()}  # the first one connects

    with Network(2, rate=RATE) as net:
        results = run_ranks(
            body, len(placement), ledger=False, timeout=300, enter=net.placement(placement)
        )
    return {
        name: [
            (max(r[name][k][0] for r in results), int(max(r[name][k][1] for r in results)))
            for k in range(repeats)
        ]
        for name in results[0]
    }


def start(placement: tuple[int, ...], nbytes: int, rounds: int, number: int) -> Start:
    """One start of the ranks, on fresh nodes."""
    found = compare(placement, nbytes, rounds, number)
    sent = {who: statistics.median(b for _, b in samples) for who, samples in found.items()}
    nodes = tuple(tuple(r for r, n in enumerate(placement) if n == node) for node in (0, 1))
    formula = [
        bytes_leaving_a_node(topology.Topology(nodes), 1, kind) for kind in ("hierarchical", "ring")
    ]
    facts = {
        "MB sent, solution / gloo": f"{sent['solution'] / 1e6:.2f} / {sent['gloo'] / 1e6:.2f}",
        "ratio of MB, by the formula": f"{formula[0] / formula[1]:.2f}",
    }
    return Start({who: [1e3 * s for s, _ in samples] for who, samples in found.items()}, facts)


PAIRED = Paired(
    title=TITLE,
    labels=("ranks", "MB"),
    unit="ms",
    pairs=[("solution", "gloo")],
    facts=("MB sent, solution / gloo", "ratio of MB, by the formula"),
    cases=lambda: [
        Case((name, f"{nbytes / 1e6:g}"), partial(start, placement, nbytes))
        for name, placement in PLACEMENTS.items()
        for nbytes in SIZES
    ],
    rounds=3,
    note="Exercise 3.8 against gloo's all_reduce, which is one ring through all ranks. A run takes "
    "as long as its slowest rank. MB sent are those of the busier node, counted by its interface.",
    obstacle=cluster_obstacle,
)
