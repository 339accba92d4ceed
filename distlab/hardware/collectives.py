"""How long a backend's collective takes: closed forms of the algorithms that NCCL and gloo use.

There are W ranks with N bytes each; α and β = 1/bandwidth describe the link between two of them. A
group on several nodes has M nodes with L ranks each, α_i, β_i inside a node and α_b, β_b between
nodes. With k network cards per node, k rings run side by side and use all cards: β_n = β_b / min(k,
L).

=============  =================================================================================
ring           2(X α_b + (W-1-X) α_i) + 2(W-1)/W·N·max(β_i, β_n), X = min(M, W-1); on one node
               X = 0, that is 2(W-1)(α + N/W·β)
tree           2(⌈log₂M⌉ α_b + (L-1) α_i) + 2N·max(β_i, β_n): the halves of N use two trees
hierarchical   reduce-scatter in the nodes, L rings of N/L between them, all-gather in the nodes
naive          gather to a root and broadcast from it: 2(W-1)(α + Nβ)
halving        recursive halving and doubling: 2⌈log₂W⌉ α + 2(W-1)/W·Nβ
in-network     the switch of one node sums: α + N(1 + 1/W)·β with its own α and β
=============  =================================================================================

Where processors move the bytes (gloo), a collective takes at least as long as they need for all
bytes. ``backend`` is the fastest of ring, tree, hierarchical and in-network, as NCCL's tuner
chooses. Sources: Patarasuk & Yuan 2009 (ring); Sanders et al. 2009 (two trees); Thakur et al. 2005
(halving, and the operators below); NCCL, src/graph/tuning.cc (the algorithms to choose from).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..observe.log import traffic
from .clusters import Cluster
from .curves import Curve, reach

Shape = tuple[int, int, int]  # ranks, nodes, ranks on a node


def collective_time(
    op: str, nbytes: float, group: tuple[int, ...], cluster: Cluster, algorithm: str = "backend"
) -> float:
    """Seconds of ``op`` with ``nbytes`` passed in by each rank of ``group``.

    ``algorithm`` is a name of ``ALGORITHMS`` or ``"backend"``; it matters for all_reduce only.
    Raises ValueError for another name.
    """
    if algorithm != "backend" and algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: {', '.join([*ALGORITHMS, 'backend'])}")
    ranks = len(group)
    if ranks == 1:
        return cluster.alone
    nodes = len({cluster.node(rank) for rank in group})
    shape = ranks, nodes, math.ceil(ranks / nodes)
    crowded = cluster.crowded(ranks) and cluster.crowded_launch > 0
    launch = cluster.crowded_launch if crowded else cluster.launch
    seconds = launch + _unshared(op, nbytes, shape, cluster, algorithm)
    measured = algorithm == "backend" and any(curve.op == op for curve in cluster.curves)
    if measured:

        def closed_form(curve: Curve, size: float) -> float:
            shape = curve.ranks, curve.nodes, math.ceil(curve.ranks / curve.nodes)
            return launch + _unshared(op, size / parts(op, curve.ranks), shape, cluster)

        size = nbytes * parts(op, ranks)
        seconds /= reach(cluster.curves, op, size, ranks, nodes, closed_form)
    if measured or not cluster.processors:
        return seconds
    moved = sum(traffic(op, ranks, int(nbytes), is_root=r == 0)[0] for r in range(ranks))
    return max(seconds, moved / nodes * cluster.inside.beta * 2 / cluster.processors)


def message_factor(nbytes: float, cluster: Cluster, nodes: int) -> float:
    """How many times longer than α + nβ a message was measured to take, inside a node or between
    two; 1 where none was measured."""
    link = cluster.inside if nodes == 1 else cluster.between

    def closed_form(_: Curve, size: float) -> float:
        return link.alpha + size * link.beta

    return 1 / reach(cluster.curves, "send", nbytes, 2, nodes, closed_form)


def parts(op: str, ranks: int) -> int:
    """Into how many parts, one passed in by each rank, a curve's size is divided."""
    return ranks if op == "all_gather" else 1


def _unshared(
    op: str, nbytes: float, shape: Shape, cluster: Cluster, algorithm: str = "backend"
) -> float:
    """The same after its launch, if there were a processor for every message."""
    ranks, nodes, _ = shape
    if op == "all_reduce":
        if algorithm != "backend":
            return ALGORITHMS[algorithm](nbytes, shape, cluster)
        usable = [ring, tree] + ([hierarchical] if nodes > 1 else [])
        if cluster.in_network is not None and nodes == 1 and ranks > 2:
            usable.append(in_network)
        return min(f(nbytes, shape, cluster) for f in usable)
    return _other(op, nbytes, shape, cluster)


def _other(op: str, nbytes: float, shape: Shape, c: Cluster) -> float:
    """The operators with one algorithm each; N as in the ledger's table of traffic."""
    ranks, nodes, _ = shape
    alpha, beta = _links(shape, c)
    steps = 2 * math.ceil(math.log2(ranks))
    if op == "barrier":
        return steps * alpha
    if op in ("all_gather", "gather", "scatter"):
        nbytes *= ranks  # each rank passes in one shard
    if op in ("all_gather", "reduce_scatter"):
        return ring(nbytes, shape, c) / 2
    if op == "all_to_all" and nodes > 1:
        away = nbytes * (ranks - shape[2]) / ranks  # through the rank's share of the cards
        share = min(c.nics_per_node, shape[2]) / shape[2]
        return (ranks - 1) * alpha + away * c.between.beta / share
    if op in ("all_to_all", "gather", "scatter"):
        return (ranks - 1) * (alpha + nbytes / ranks * beta)
    return _hops(shape, c, nodes - 1) + nbytes * beta  # broadcast, reduce: a pipelined chain


def _hops(shape: Shape, c: Cluster, crossings: int) -> float:
    """Latency of a way past all ranks that goes between nodes so many times."""
    return crossings * c.between.alpha + (shape[0] - 1 - crossings) * c.inside.alpha


def _links(shape: Shape, c: Cluster) -> tuple[float, float]:
    """(α, seconds per byte) that bound a ring through all ranks."""
    _, nodes, local = shape
    if nodes == 1:
        return c.inside.alpha, c.inside.beta
    return c.between.alpha, max(c.inside.beta if local > 1 else 0.0, _node_beta(shape, c))


def _node_beta(shape: Shape, c: Cluster) -> float:
    """Seconds per byte out of a node through all the cards that its ranks can use."""
    return c.between.beta * c.oversubscription / min(c.nics_per_node, shape[2])


def ring(nbytes: float, shape: Shape, c: Cluster) -> float:
    """Reduce-scatter, then all-gather, around one ring (or one per network card)."""
    ranks, nodes, _ = shape
    _, beta = _links(shape, c)
    crossings = min(nodes, ranks - 1) if nodes > 1 else 0
    return 2 * _hops(shape, c, crossings) + 2 * (ranks - 1) / ranks * nbytes * beta


def tree(nbytes: float, shape: Shape, c: Cluster) -> float:
    """Up and down two complementary binary trees over the nodes, a chain inside each node."""
    _, nodes, local = shape
    _, beta = _links(shape, c)
    if nodes == 1:
        depth = math.ceil(math.log2(local)) * c.inside.alpha
    else:
        depth = math.ceil(math.log2(nodes)) * c.between.alpha + (local - 1) * c.inside.alpha
    return 2 * depth + 2 * nbytes * beta


def hierarchical(nbytes: float, shape: Shape, c: Cluster) -> float:
    """Reduce-scatter inside the nodes, all-reduce of the parts between them, all-gather inside."""
    _, nodes, local = shape
    inside = 2 * (local - 1) * (c.inside.alpha + nbytes / local * c.inside.beta)
    if nodes == 1:
        return inside
    between = 2 * (nodes - 1) * (c.between.alpha + nbytes / nodes * _node_beta(shape, c))
    return inside + between


def naive(nbytes: float, shape: Shape, c: Cluster) -> float:
    """All send to one root, which sends the sum to all."""
    alpha, _ = _links(shape, c)
    beta = c.inside.beta if shape[1] == 1 else c.between.beta
    return 2 * (shape[0] - 1) * (alpha + nbytes * beta)


def halving(nbytes: float, shape: Shape, c: Cluster) -> float:
    """Recursive halving (reduce-scatter) and doubling (all-gather)."""
    ranks = shape[0]
    alpha, beta = _links(shape, c)
    return 2 * math.ceil(math.log2(ranks)) * alpha + 2 * (ranks - 1) / ranks * nbytes * beta


def in_network(nbytes: float, shape: Shape, c: Cluster) -> float:
    """Every rank sends its data to the switch once and gets the sum once (NVLink SHARP)."""
    assert c.in_network is not None
    return c.in_network.alpha + nbytes * (1 + 1 / shape[0]) * c.in_network.beta


ALGORITHMS: dict[str, Callable[[float, Shape, Cluster], float]] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "naive": naive,
    "halving": halving,
}
