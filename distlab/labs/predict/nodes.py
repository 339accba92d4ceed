"""Predictions for nodes: who shares one, which all-reduce when, and one that knows nodes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .allreduce import TENSOR, nbytes_of
from .case import Case, draws, machine_of
from .scene import Found, Quantity, Scene, Seen, Work, bytes_sent, clocked, collectives, messages


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


def across(nbytes: Callable[[Case], float], formula: str, why: str) -> Quantity:
    """Bytes of an all-reduce over M nodes, of 1/L of the bytes that L ranks of a node share."""
    return Quantity(
        name="across",
        asks="bytes that a rank sends over the slowest link, the network",
        unit="bytes",
        formula=formula,
        value=lambda c: 2 * (c["M"] - 1) / c["M"] * nbytes(c) / c["L"],
        answers={
            "ledger": lambda s: max(log.select("all_reduce").sent for log in s.logs),
            "clock": lambda s: s.across,
        },
        tolerance=0.01,
        why=why,
    )


NODES = (
    collectives(lambda c: 3, "3: reduce-scatter, all-reduce of the shard, all-gather"),
    bytes_sent(
        lambda c: (2 * (c["L"] - 1) + 2 * (c["M"] - 1) / c["M"]) / c["L"] * nbytes_of(c),
        "2(L-1)/L·N + 2(M-1)/M·N/L",
    ),
    across(nbytes_of, "2(M-1)/M·N/L", "1 %: chunks are whole elements"),
    clocked(
        _hierarchical_seconds,
        formula="3·launch + 2(L-1)·(α_in + N/L·β_in) + 2(M-1)·(α_out + N/(L·M)·β_out)",
    ),
)


def _choice(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    tensor = torch.ones(case["n"])
    programs = {
        "ring": impl.module("ring_allreduce").ring_all_reduce,
        "tree": impl.module("tree_allreduce").tree_all_reduce,
    }
    links = dict.fromkeys(programs, impl.Link(case.alpha, case.beta))

    def work() -> Found:
        found = {}
        for name, program in programs.items():
            dist.barrier()
            begin = time.monotonic()
            program(tensor)
            found[name] = time.monotonic() - begin
            found[f"predicted {name}"] = impl.predict(name, case["W"], nbytes_of(case), links)
        return found

    return work


def _draw_choice(random_: random.Random) -> Case:
    cluster, _ = machine_of(random_)
    w, n = random_.choice([4, 6, 8, 12, 16]), 840 * random_.choice([1, 10, 100, 1000])
    return Case("3.29", cluster, {"W": w, "n": n}, spread=True)


def _ring(case: Case) -> float:
    return 2 * (case["W"] - 1) * (case.alpha + nbytes_of(case) / case["W"] * case.beta)


def _tree(case: Case) -> float:
    return 2 * (case["W"] - 1).bit_length() * (case.alpha + nbytes_of(case) * case.beta)


def _pattern(name: str, value: Any, formula: str) -> Quantity:
    return Quantity(
        name=name,
        asks=f"seconds of the {name}",
        unit="seconds",
        formula=formula,
        value=value,
        answers={
            "predict()": lambda seen: seen.found(f"predicted {name}"),
            "clock": lambda seen: seen.found(name),
        },
        tolerance=0.03,
        why="3 %: chunks are whole elements, and a rank needs time to read its clock",
    )


def _tree_wins(seen: Seen) -> float:
    return float(seen.found("tree") < seen.found("ring"))


class _Counting:
    """The ranks' store; counts the keys that are read."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.reads, self.writes = store, 0, 0

    def set(self, key: str, value: str) -> None:
        """As the store does."""
        self.writes += 1
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """As the store does."""
        self.reads += 1
        return self.store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def _places(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    store = _Counting(dist.PrefixStore("predict", dist.distributed_c10d._get_default_store()))
    place = impl.Place(f"node{ctx.rank // case['L']}", None, None)

    def work() -> Found:
        places = impl.exchange_places(place, store, ctx.rank, case["W"])
        nodes = impl.topology_of(places).nodes
        columns = max(map(len, nodes))
        return {"keys": float(store.reads), "groups": float(len(nodes) + columns)}

    return work


def _draw_places(random_: random.Random) -> Case:
    nodes, each = random_.choice([2, 3, 4]), random_.choice([2, 4])
    sizes = {"W": nodes * each, "M": nodes, "L": each}
    return Case("3.7", random_.choice(["dgx-h100", "p4d-a100"]), sizes, nodes=nodes)


def _edges(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    top, bottom = torch.ones(case["n"]), torch.ones(case["n"])
    return lambda: impl.swap_edges(top, bottom) and None


SCENES = (
    Scene(
        exercise="3.29",
        tells=f"{TENSOR}: ring or tree?",
        draw=_draw_choice,
        prepare=_choice,
        quantities=(
            _pattern("ring", _ring, "2(W-1)·(α + N/W·β)"),
            _pattern("tree", _tree, "2⌈log₂ W⌉·(α + N·β)"),
            Quantity(
                name="tree_wins",
                asks="whether the tree is faster",
                unit="yes or no",
                formula="whichever of the two takes less",
                value=lambda c: float(_tree(c) < _ring(c)),
                answers={"clock": _tree_wins},
                why="none, it is one of two",
            ),
        ),
        doubled="The ring's latency more than doubles. The tree's grows by one round each way: "
        "trees gain.",
    ),
    Scene(
        exercise="3.7",
        tells="W = {W} ranks on M = {M} nodes of L = {L} tell each other where they are, through a "
        "store, and make groups.",
        draw=_draw_places,
        prepare=_places,
        quantities=(
            Quantity(
                name="keys",
                asks="keys that one rank reads",
                unit="keys",
                formula="W",
                value=lambda c: c["W"],
                answers={"store": lambda s: s.found("keys")},
            ),
            Quantity(
                name="groups",
                asks="groups that a rank makes",
                unit="groups",
                formula="M + L",
                value=lambda c: c["M"] + c["L"],
                answers={"topology": lambda s: s.found("groups")},
            ),
        ),
        doubled="Four times as many reads in all: the store becomes the bottleneck.",
    ),
    Scene(
        exercise="3.30",
        tells="W = {W} ranks in a ring send an edge of {n:,} float32 numbers (N = {N:,} bytes) to "
        "each neighbour.",
        draw=draws("3.30", [3, 4, 6, 8], n=[1000, 50_000]),
        prepare=_edges,
        quantities=(
            messages(lambda c: 2, "2", answers={"ledger": lambda s: s.messages}),
            bytes_sent(lambda c: 2 * nbytes_of(c), "2N", answers={"ledger": lambda s: s.sent}),
        ),
        doubled="A rank sends as much as before, to two neighbours.",
    ),
    Scene(
        exercise="3.8",
        tells=f"{TENSOR} on M = {{M}} nodes of L = {{L}} ranks, all-reduced in the nodes, between "
        "them, and in the nodes again.",
        draw=_draw_nodes,
        prepare=_hierarchical,
        quantities=NODES,
        doubled="With twice as many nodes the bytes between them stay below 2N/L per rank.",
    ),
)
