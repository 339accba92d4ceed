"""The player of the hierarchical all-reduce, beside the ring that doesn't know of nodes.

The solution's stages are collectives of the backend: the ledger says who takes part, ``contents``
what each rank gives to the next stage.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from distlab.hardware.clusters import Cluster, load_cluster
from distlab.player.cells import Message, Round, Walk, scene_of_walk
from distlab.player.scene import Choice, Scene, document
from distlab.player.words import amount, several
from distlab.ranks.context import RankContext
from distlab.virtual.reports import VirtualResults
from distlab.virtual.run import run_virtual

from .collectives import SIZES, body, ended, finished, module_of, ring, walk_of

SHAPES = {"2 nodes of 2": (2, 2), "2 nodes of 4": (2, 4), "4 nodes of 2": (4, 2)}  # nodes, ranks
CLUSTER = "p4d-a100"


def of_nodes(ranks: int) -> Cluster:
    """A cluster with so many GPUs in a node, each with its share of the network cards."""
    whole = load_cluster(CLUSTER)
    cards = max(1, whole.nics_per_node * ranks // whole.gpus_per_node)
    return dataclasses.replace(whole, gpus_per_node=ranks, nics_per_node=cards)


def hierarchical(ctx: RankContext, tensor: Any, nodes: list[list[int]]) -> None:
    """Exercise 3.8."""
    topology = module_of(3, "topology")
    groups = topology.make_groups(topology.Topology(tuple(map(tuple, nodes))))
    module_of(3, "hierarchical_allreduce").all_reduce_hierarchical(tensor, groups)


def staged(results: VirtualResults, nodes: list[list[int]], cluster: Cluster) -> Walk:
    """The three stages: what each rank gives to a stage is what it held before."""
    ranks = range(len(results))
    local = {rank: node.index(rank) for node in nodes for rank in node}
    walk = Walk([list(results[rank][0][0][2]) for rank in ranks], "shard", nodes=nodes)
    sent = [0] * len(ranks)
    crossed = 0
    for stage, (name, say) in enumerate(_stages(nodes)):
        events = [results.logs[rank].events[stage] for rank in ranks]
        state, messages = [], []
        for rank, event in zip(ranks, events, strict=True):
            sent[rank] += event.sent
            others = [peer for peer in event.group if peer != rank]
            crossed += event.sent * any(cluster.node(p) != cluster.node(rank) for p in others)
            state.append(_held(results[rank], stage, local[rank]))
            for peer in others:
                piece = local[peer] if event.op == "all_to_all" else local[rank]
                given = results[rank][0][stage][1]
                parts = given[local[peer]] if event.op == "all_to_all" else given[0]
                messages.append(Message(rank, peer, (piece,), parts))
        seconds = max(map(ended, events))
        walk.rounds.append(Round(name, messages, state, seconds, max(sent), crossed, say))
    return walk


def _held(result: list[Any], stage: int, own: int) -> list[int]:
    """Whose parts a rank's shards have after a stage: of its own one until the last."""
    looks, last, _ = result
    if stage + 1 == len(looks):
        return list(last)
    given = looks[stage + 1][1][0]
    return [given if shard == own else 0 for shard in range(len(last))]


def _stages(nodes: list[list[int]]) -> list[tuple[str, str]]:
    inside, across = len(nodes[0]), len(nodes)
    return [
        (
            "Reduce-scatter inside the nodes",
            f"each rank gives away all shards but its own, and holds its node's sum of one shard: "
            f"that of {several(inside, 'rank')}",
        ),
        (
            "All-reduce between the nodes",
            f"the {across} ranks that hold the same shard add it up; only this stage uses the slow "
            "links (thick, dashed)",
        ),
        (
            "All-gather inside the nodes",
            "each rank gives its complete shard to the others of its node",
        ),
    ]


def recorded(algorithm: str, count: int, per_node: int, numel: int) -> Scene:
    """The scene of one run."""
    cluster = of_nodes(per_node)
    nodes = [[*range(k * per_node, (k + 1) * per_node)] for k in range(count)]
    ranks = count * per_node
    if algorithm == "ring":
        results = run_virtual(body, ranks, ring, numel, ranks, cluster=cluster)
        walk = walk_of(results, "chunk", cluster, nodes)
    else:
        run = lambda ctx, tensor: hierarchical(ctx, tensor, nodes)
        results = run_virtual(body, ranks, run, numel, per_node, cluster=cluster)
        walk = staged(results, nodes, cluster)
    scene = finished(scene_of_walk(walk), results)
    scene.ended["crossed"] = amount(results.traffic["nic out"])
    return scene


def player() -> dict[str, Any]:
    """With nodes, algorithm and tensor size to choose."""
    sizes = {amount(8 * numel): numel for numel in SIZES}
    scenes: dict[tuple[str, ...], Scene] = {
        (shape, algorithm, size): recorded(algorithm, *SHAPES[shape], numel)
        for shape in SHAPES
        for algorithm in ("hierarchical", "ring")
        for size, numel in sizes.items()
    }
    choices = [
        Choice("ranks", tuple(SHAPES)),
        Choice("algorithm", ("hierarchical", "ring")),
        Choice("tensor", tuple(sizes)),
    ]
    return document(
        "Hierarchical all-reduce",
        "Links inside a node are fast, links between nodes are slow. Choose the ring to compare "
        "the time and the bytes between the nodes.",
        choices,
        scenes,
        ("2 nodes of 4", "hierarchical", amount(8 * SIZES[-1])),
    )
