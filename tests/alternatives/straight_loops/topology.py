# for: 3.7
"""Written from the docstrings alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    host: str
    node: int | None
    local_rank: int | None


@dataclass(frozen=True)
class Topology:
    nodes: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def even(self) -> bool:
        return len({len(ranks) for ranks in self.nodes}) == 1

    def locate(self, rank: int) -> tuple[int, int]:
        where = {r: (n, k) for n, ranks in enumerate(self.nodes) for k, r in enumerate(ranks)}
        if rank not in where:
            raise ValueError(f"no node has rank {rank}")
        return where[rank]


def own_place(environ: Mapping[str, str], host: str) -> Place:
    node, local = (int(environ[k]) if k in environ else None for k in ("GROUP_RANK", "LOCAL_RANK"))
    return Place(host=host, node=node, local_rank=local)


def exchange_places(place: Place, store: dist.Store, rank: int, world_size: int) -> list[Place]:
    store.set(f"rank {rank}", json.dumps([place.host, place.node, place.local_rank]))
    keys = [f"rank {r}" for r in range(world_size)]
    return [Place(*json.loads(store.get(key).decode())) for key in keys]


def topology_of(places: Sequence[Place]) -> Topology:
    pairs = {(place.host, place.node) for place in places}
    known = {node for _, node in pairs if node is not None}
    if known and any((node is None for _, node in pairs)):
        raise ValueError("some ranks know their node and some do not")
    if len(pairs) > len({host for host, _ in pairs}) or (known and len(pairs) > len(known)):
        raise ValueError(f"hosts and the launcher's nodes contradict each other: {sorted(pairs)}")
    nodes = []
    for host in dict.fromkeys(place.host for place in places):
        ranks = tuple(r for r in range(len(places)) if places[r].host == host)
        said = [places[r].local_rank for r in ranks]
        if said not in ([None] * len(ranks), list(range(len(ranks)))):
            raise ValueError(f"{host}: local ranks {said}")
        nodes.append(ranks)
    return Topology(tuple(nodes))


def device_of(topology: Topology, rank: int, gpus: int) -> torch.device:
    index, local = topology.locate(rank)
    if gpus and gpus < len(topology.nodes[index]):
        raise ValueError("more ranks than GPUs")
    return torch.device(f"cuda:{local}" if gpus else "cpu")


@dataclass(frozen=True)
class NodeGroups:
    topology: Topology
    node: dist.ProcessGroup
    across: dist.ProcessGroup


def make_groups(topology: Topology) -> NodeGroups:
    everybody = [r for ranks in topology.nodes for r in ranks]
    if len(everybody) != dist.get_world_size() or set(everybody) != set(range(len(everybody))):
        raise ValueError("not each rank of the world once")
    index, local = topology.locate(dist.get_rank())
    across = None
    for k in range(max(len(ranks) for ranks in topology.nodes)):
        made = dist.new_group([ranks[k] for ranks in topology.nodes if len(ranks) > k])
        across = made if k == local else across
    node = None
    for n, ranks in enumerate(topology.nodes):
        made = dist.new_group([*ranks])
        node = made if n == index else node
    return NodeGroups(topology=topology, node=node, across=across)
