"""The prediction for the all-reduce that knows nodes."""

from __future__ import annotations

import random

import torch

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .allreduce import TENSOR, nbytes_of
from .case import Case
from .scene import Quantity, Scene, Work, bytes_sent, clocked, collectives


def _hierarchical(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    topology, each = impl.module("topology"), case["L"]
    nodes = tuple(tuple(range(k, k + each)) for k in range(0, case["W"], each))
    groups = topology.make_groups(topology.Topology(nodes))
    tensor = torch.ones(case["n"])
    return lambda: impl.all_reduce_hierarchical(tensor, groups)


def _draw_nodes(random_: random.Random) -> Case:
    nodes, each = random_.choice([2, 3, 4]), random_.choice([2, 4])
    n = 840 * nodes * random_.randint(40, 200)
    sizes = {"W": nodes * each, "n": n, "M": nodes, "L": each}
    return Case("3.8", random_.choice(["dgx-h100", "p4d-a100"]), sizes, nodes=nodes)


def _hierarchical_seconds(case: Case) -> float:
    c, m, each, n = case.machine, case["M"], case["L"], nbytes_of(case)
    inside = 2 * (each - 1) * (c.inside.alpha + n / each * c.inside.beta)
    between = 2 * (m - 1) * (c.between.alpha + n / each / m * c.between.beta)
    return 3 * c.launch + inside + between


NODES = (
    collectives(lambda c: 3, "3: reduce-scatter, all-reduce of the shard, all-gather"),
    bytes_sent(
        lambda c: (2 * (c["L"] - 1) + 2 * (c["M"] - 1) / c["M"]) / c["L"] * nbytes_of(c),
        "2(L-1)/L·N + 2(M-1)/M·N/L",
    ),
    Quantity(
        name="across",
        asks="bytes that a rank sends over the slowest link, the network",
        unit="bytes",
        formula="2(M-1)/M·N/L",
        value=lambda c: 2 * (c["M"] - 1) / c["M"] * nbytes_of(c) / c["L"],
        answers={
            "ledger": lambda s: max(log.select("all_reduce").sent for log in s.logs),
            "clock": lambda s: s.across,
        },
        tolerance=0.01,
        why="1 %: chunks are whole elements",
    ),
    clocked(
        _hierarchical_seconds,
        formula="3·launch + 2(L-1)·(α_in + N/L·β_in) + 2(M-1)·(α_out + N/(L·M)·β_out)",
    ),
)

SCENES = (
    Scene(
        exercise="3.8",
        tells=f"{TENSOR} on M = {{M}} nodes of L = {{L}} ranks, all-reduced in the nodes, between "
        "them, and in the nodes again.",
        draw=_draw_nodes,
        prepare=_hierarchical,
        quantities=NODES,
        doubled="With twice as many nodes the bytes between them stay near 2N/L per rank.",
    ),
)
