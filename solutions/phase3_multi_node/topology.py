"""Which ranks share a node: every rank says what it knows, all agree, and groups are made.

W ranks are on M nodes. Inside a node they talk over memory or NVLink, between nodes over a network
that is up to a hundred times slower. A program that spares the network has to know which ranks
share a node. A rank's number does not say it. The launcher and the operating system do:

    own_place           GROUP_RANK, LOCAL_RANK and the host name of this rank
    exchange_places     those of all ranks, W keys in a store: no process group is needed yet
    topology_of         the ranks of each node; a contradiction is an error on every rank
    make_groups         a group per node, and one per local rank: M + L groups, L ranks on a node

Invariant: all ranks compute the same topology from the same list. All of them make all groups in
one order, also the groups that they are not in.

Source: PyTorch's documentation of torchrun (environment of the launcher).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """What one rank knows of where it runs; None if its launcher does not say."""

    host: str
    node: int | None  # the launcher's number of the node
    local_rank: int | None  # the launcher's number of the rank on its node


@dataclass(frozen=True)
class Topology:
    """The global ranks of each node, ascending; nodes in the order of their lowest rank."""

    nodes: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    def locate(self, rank: int) -> tuple[int, int]:
        """(index of the node, local rank) of a global rank; ValueError if it is on no node."""
        # --- exercise 3.7: start
        # Step 1: find the node that has this rank; its position among the node's ranks is the local
        #         rank
        for index, ranks in enumerate(self.nodes):
            if rank in ranks:
                return index, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of {len(self.nodes)} nodes")
        # --- exercise 3.7: end


def own_place(environ: Mapping[str, str], host: str) -> Place:
    """This rank's place by the launcher's GROUP_RANK (the node) and LOCAL_RANK, and the host name.

    RANK says nothing about nodes: a launcher may fill one node after another, or deal ranks out.
    """
    # --- exercise 3.7: start
    # Step 2: both variables as numbers, None for one that is not set
    node, local_rank = environ.get("GROUP_RANK"), environ.get("LOCAL_RANK")
    return Place(
        host,
        None if node is None else int(node),
        None if local_rank is None else int(local_rank),
    )
    # --- exercise 3.7: end


def exchange_places(place: Place, store: dist.Store, rank: int, world_size: int) -> list[Place]:
    """The places of all ranks in rank order, the same list on every rank.

    It uses ``store`` alone, which all ranks share, and needs no process group. It returns when all
    ranks have called it. Call it once per store (or wrap the store in a PrefixStore to call it
    again).
    """
    # --- exercise 3.7: start
    # Step 3: publish the own place under a key of its own, then read every rank's: get waits for it
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    texts = [store.get(f"place/{other}") for other in range(world_size)]
    return [Place(**json.loads(text)) for text in texts]
    # --- exercise 3.7: end


def topology_of(places: Sequence[Place]) -> Topology:
    """Which ranks share a node, from what all ranks say (``places[r]``: rank r).

    Two ranks share a node if their host names are equal. The launcher's numbers must agree with
    that. Raises ValueError if the launcher puts two ranks of one host on different nodes, if one of
    its nodes has different hosts, or if only some ranks know their node. Raises ValueError, too,
    unless the local ranks of a node, in rank order, count up from 0. If no rank of a node knows its
    local rank, that is no contradiction. All ranks compute it from the same list, so all of them
    raise or none.
    """
    # --- exercise 3.7: start
    # Step 4: compare each rank with the first on its host, and the first on the launcher's node
    # Step 5: collect ranks by host, in rank order; check the local ranks of each
    first_on_host: dict[str, int] = {}
    first_on_node: dict[int, int] = {}
    by_host: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        if (place.node is None) != (places[0].node is None):
            raise ValueError(f"of ranks 0 and {rank} only one knows its node")
        other = first_on_host.setdefault(place.host, rank)
        if places[other].node != place.node:
            raise ValueError(
                f"ranks {other} and {rank} are both on host {place.host!r}, but the launcher puts "
                f"them on nodes {places[other].node} and {place.node}"
            )
        other = rank if place.node is None else first_on_node.setdefault(place.node, rank)
        if places[other].host != place.host:
            raise ValueError(
                f"the launcher puts ranks {other} and {rank} on node {place.node}, but their hosts "
                f"are {places[other].host!r} and {place.host!r}"
            )
        by_host.setdefault(place.host, []).append(rank)
    for host, ranks in by_host.items():
        local_ranks = [places[rank].local_rank for rank in ranks]
        if local_ranks not in ([*range(len(ranks))], [None] * len(ranks)):
            raise ValueError(f"ranks {ranks} on host {host!r} have local ranks {local_ranks}")
    return Topology(tuple(map(tuple, by_host.values())))
    # --- exercise 3.7: end


def device_of(topology: Topology, rank: int, gpus: int) -> torch.device:
    """The device of ``rank`` on a node with ``gpus`` GPUs: one each, or the CPU if there is none.

    Raises ValueError if the node has more ranks than GPUs.
    """
    # --- exercise 3.7: start
    # Step 6: GPUs are numbered from 0 on every node: choose by the local rank, never by the rank
    node, local_rank = topology.locate(rank)
    if 0 < gpus < len(topology.nodes[node]):
        raise ValueError(f"node {node} has {len(topology.nodes[node])} ranks for {gpus} GPUs")
    return torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    # --- exercise 3.7: end


@dataclass(frozen=True)
class NodeGroups:
    """The groups of this rank: its node, and the ranks with its local rank on all nodes.

    The ``across`` group of the local ranks 0, the leaders, has a rank of every node.
    """

    topology: Topology
    node: dist.ProcessGroup
    across: dist.ProcessGroup


def make_groups(topology: Topology) -> NodeGroups:
    """One group per node and one per local rank; returns those that this rank is in.

    On nodes of different size the group of a local rank has only nodes that are large enough. All
    ranks of the world call it, with the same topology. All ranks make all M + L groups in one
    order, where L is the number of ranks on the largest node. A rank also makes the groups that it
    is not in. Raises ValueError, on every rank, unless ``topology`` has each rank of the world
    once.
    """
    # --- exercise 3.7: start
    # Step 7: refuse a topology of other ranks: a rank that it leaves out is in no group
    # Step 8: list the ranks of all groups first: that list is the same on every rank
    # Step 9: make every one of them on every rank, and keep the two with this rank in it
    everyone = [*range(dist.get_world_size())]
    if sorted(sum(topology.nodes, ())) != everyone:
        raise ValueError(f"nodes {topology.nodes} must have each of {len(everyone)} ranks once")
    node, local_rank = topology.locate(dist.get_rank())
    largest = max(map(len, topology.nodes))
    columns = [[r[k] for r in topology.nodes if k < len(r)] for k in range(largest)]
    of_nodes = [dist.new_group(list(ranks)) for ranks in topology.nodes]
    of_local_ranks = [dist.new_group(ranks) for ranks in columns]
    return NodeGroups(topology, of_nodes[node], of_local_ranks[local_rank])
    # --- exercise 3.7: end
