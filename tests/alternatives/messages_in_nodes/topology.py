# for: 3.7, 3.8
"""Written differently: rank 0 passes the list on, messages inside nodes, unequal shards."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum}


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


def exchange(sends, receives, group):
    """Post all messages at once, {group rank: tensor}, and wait for them."""
    handles = [dist.irecv(t, group=group, group_src=r) for r, t in receives.items()]
    handles += [dist.isend(t, group=group, group_dst=r) for r, t in sends.items()]
    for handle in handles:
        handle.wait()


def all_reduce_by_messages(buffer, op, group):
    """Every rank combines one (unequal) part and gives it to all, by messages alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = list(buffer.tensor_split(size))
    others = [r for r in range(size) if r != rank]
    got = {r: torch.empty_like(parts[rank]) for r in others}
    exchange({r: parts[r] for r in others if len(parts[r])},
             {r: t for r, t in got.items() if len(t)}, group)  # fmt: skip
    total = None
    for r in range(size):
        version = parts[rank] if r == rank else got[r]
        total = version.clone() if total is None else COMBINE[op](total, version)
    parts[rank].copy_(total)
    yield parts[rank]
    exchange({r: parts[rank] for r in others if len(total)},
             {r: parts[r] for r in others if len(parts[r])}, group)  # fmt: skip


def all_reduce_hierarchical(tensor, groups, op="sum", *, check=False):
    if op not in COMBINE:
        raise ValueError(f"no operator {op!r}")
    if op == "mean" and not tensor.dtype.is_floating_point:
        raise ValueError(f"no mean of {tensor.dtype}")
    if check:
        own = torch.tensor([tensor.numel(), DTYPES.index(tensor.dtype)])
        every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        if any(not torch.equal(own, other) for other in every):
            raise ValueError(f"length and number of dtype by rank: {every}")
    buffer = tensor.detach().contiguous().clone().view(-1)
    if groups.topology.even:
        for own in all_reduce_by_messages(buffer, op, groups.node):
            for _ in all_reduce_by_messages(own, op, groups.across):
                pass
    else:
        local, size = dist.get_rank(groups.node), dist.get_world_size(groups.node)
        for r in range(1, size):
            if local == r:
                dist.send(buffer, group=groups.node, group_dst=0)
            elif local == 0:
                version = torch.empty_like(buffer)
                dist.recv(version, group=groups.node, group_src=r)
                buffer = COMBINE[op](buffer, version)
        if local == 0:
            for _ in all_reduce_by_messages(buffer, op, groups.across):
                pass
        dist.broadcast(buffer, group=groups.node, group_src=0)
    if op == "mean":
        buffer /= groups.topology.world_size
    tensor.detach().copy_(buffer.view(tensor.shape))


def bytes_leaving_a_node(topology, nbytes, algorithm):
    ranks, nodes = topology.world_size, len(topology.nodes)
    if algorithm == "hierarchical":
        return nbytes * 2 * (1 - 1 / nodes)
    if algorithm == "ring":
        busiest = 0
        for node in range(nodes):
            hops = [r for r in topology.nodes[node] if topology.locate((r + 1) % ranks)[0] != node]
            busiest = max(busiest, len(hops))
        return busiest * nbytes * 2 * (1 - 1 / ranks)
    raise ValueError(f"no algorithm {algorithm!r}")
