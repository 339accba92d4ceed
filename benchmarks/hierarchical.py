"""All-reduce between two nodes on this machine: hierarchical against gloo's flat ring.

The nodes' links are shaped (``distlab.netcluster``). Both run in the same ranks in turn; the
slowest rank's time counts. The bytes are those that the interface of a node counted.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from distlab.netcluster import Network, bytes_sent, cluster_obstacle
from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node import topology
from solutions.phase3_multi_node.hierarchical_allreduce import (
    all_reduce_hierarchical,
    bytes_leaving_a_node,
)

from .common import Table, spread

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


def compare(placement: tuple[int, ...], nbytes: int, repeats: int) -> dict[str, list[Sample]]:
    """The samples of both, taken in turn on fresh nodes."""

    def body(ctx: RankContext) -> dict[str, list[list[float]]]:
        groups, tensor = groups_of(placement), torch.ones(nbytes // 4)
        contestants: dict[str, Callable[[], object]] = {
            "gloo": lambda: dist.all_reduce(tensor),
            "solution": lambda: all_reduce_hierarchical(tensor, groups, "mean"),
        }
        samples: dict[str, list[list[float]]] = {name: [] for name in contestants}
        for _ in range(repeats + 1):
            for name, all_reduce in contestants.items():
                tensor.fill_(1.0)
                dist.barrier()
                before, begun = bytes_sent(), time.perf_counter()
                all_reduce()
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


def measure(repeats: int = 5) -> Table:
    """Time and bytes over the link, side by side."""
    obstacle = cluster_obstacle()
    header = ["ranks", "MB", "gloo, ms", "solution, ms", "ratio of medians", "gloo, MB sent"]
    header += ["solution, MB sent", "ratio", "formula"]
    if obstacle is not None:
        note = f"Not measured: needs a cluster on this machine ({obstacle})"
        return Table(TITLE, header, [], note)
    rows = []
    for name, placement in PLACEMENTS.items():
        for nbytes in SIZES:
            found = compare(placement, nbytes, repeats)
            ms = {k: [1e3 * seconds for seconds, _ in samples] for k, samples in found.items()}
            sent = {k: statistics.median(b for _, b in samples) for k, samples in found.items()}
            shape = topology.Topology(
                tuple(tuple(r for r, n in enumerate(placement) if n == node) for node in (0, 1))
            )
            formula = [bytes_leaving_a_node(shape, 1, kind) for kind in ("hierarchical", "ring")]
            rows.append(
                [
                    name,
                    f"{nbytes / 1e6:g}",
                    spread(ms["gloo"], 0),
                    spread(ms["solution"], 0),
                    f"{statistics.median(ms['solution']) / statistics.median(ms['gloo']):.2f}",
                    f"{sent['gloo'] / 1e6:.2f}",
                    f"{sent['solution'] / 1e6:.2f}",
                    f"{sent['solution'] / sent['gloo']:.2f}",
                    f"{formula[0] / formula[1]:.2f}",
                ]
            )
    return Table(
        TITLE,
        header,
        rows,
        "Exercise 3.8 against gloo's all_reduce, which is one ring through all ranks. Median "
        f"(least … most) of {repeats} runs, taken in turn. A run takes as long as its slowest "
        "rank. MB sent are those of the busier node, counted by its interface. The last column "
        "has their ratio by the formula.",
    )


if __name__ == "__main__":
    print(measure().markdown())
