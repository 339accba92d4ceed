# for: 3.7
"""Written differently: rank 0 passes the list on."""

from __future__ import annotations

import pickle
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
    nodes: tuple

    @property
    def world_size(self):
        return max(max(ranks) for ranks in self.nodes) + 1

    @property
    def even(self):
        return all(len(ranks) == len(self.nodes[0]) for ranks in self.nodes)

    def locate(self, rank):
        table = {r: (n, k) for n, ranks in enumerate(self.nodes) for k, r in enumerate(ranks)}
        if rank not in table:
            raise ValueError(f"who is rank {rank}?")
        return table[rank]


@dataclass(frozen=True)
class NodeGroups:
    topology: Topology
    node: object
    across: object


def own_place(environ, host):
    numbers = [int(environ[k]) if k in environ else None for k in ("GROUP_RANK", "LOCAL_RANK")]
    return Place(host, *numbers)


def exchange_places(place, store, rank, world_size):
    fields = (place.host, place.node, place.local_rank)
    store.set(f"mine{rank}", pickle.dumps(fields, 0).decode("latin1"))
    if rank == 0:
        parts = [pickle.loads(store.get(f"mine{r}")) for r in range(world_size)]
        store.set("all", pickle.dumps(parts, 0).decode("latin1"))
    return [Place(*fields) for fields in pickle.loads(store.get("all"))]


def topology_of(places):
    ranks = range(len(places))
    for a in ranks:
        for b in range(a):
            same_host = places[a].host == places[b].host
            if None not in (places[a].node, places[b].node):
                if same_host != (places[a].node == places[b].node):
                    raise ValueError(f"ranks {b} and {a}: {places[b]} against {places[a]}")
            elif places[a].node != places[b].node:
                raise ValueError(f"rank {b} or rank {a} does not know its node")
    nodes = {r: tuple(s for s in ranks if places[s].host == places[r].host) for r in ranks}
    for members in nodes.values():
        told = {places[r].local_rank for r in members}
        if told != {None} and [places[r].local_rank for r in members] != [*range(len(members))]:
            raise ValueError(f"the local ranks of ranks {members} are {told}")
    return Topology(tuple(nodes[r] for r in ranks if nodes[r][0] == r))


def device_of(topology, rank, gpus):
    node, local = topology.locate(rank)
    if gpus == 0:
        return torch.device("cpu")
    if len(topology.nodes[node]) > gpus:
        raise ValueError(f"{gpus} GPUs are too few for ranks {topology.nodes[node]}")
    return torch.device(f"cuda:{local}")


def make_groups(topology):
    rank, found = dist.get_rank(), {}
    listed = [member for members in topology.nodes for member in members]
    if len(listed) != len(set(listed)) or set(listed) != set(range(dist.get_world_size())):
        raise ValueError(f"ranks {listed} are not those of the world")
    columns = {}
    for members in topology.nodes:
        for local, member in enumerate(members):
            columns.setdefault(local, []).append(member)
    for kind, lists in (("across", columns.values()), ("node", topology.nodes)):
        for members in lists:
            group = dist.new_group(members)
            if rank in members:
                found[kind] = group
    return NodeGroups(topology, **found)
