"""Checks of exercise 3.7: which ranks share a node, and the groups that follow from it."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter

import torch
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)

# name: the node of each rank, in rank order
PLACEMENTS = {
    "node by node": (0, 0, 1, 1),
    "dealt out in turn": (0, 1, 0, 1),
    "dealt out, uneven": (0, 1, 2, 0, 1, 0),
    "uneven": (0, 0, 0, 1),
    "the second node is larger": (0, 1, 1, 1, 1),
    "one node": (0, 0, 0),
    "a rank per node": (0, 1, 2),
    "one rank": (0,),
    "the launcher counts nodes from the last rank": (1, 1, 0, 0),
}


def ranks_of(placement: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each node, nodes in the order of their first rank."""
    nodes = dict.fromkeys(placement)
    return [[rank for rank, on in enumerate(placement) if on == node] for node in nodes]


def local_rank_of(placement: tuple[int, ...], rank: int) -> int:
    return Counter(placement[:rank])[placement[rank]]


def places_of(impl, placement: tuple[int, ...], launcher: bool = True) -> list:
    """The places that the ranks report. The launcher numbers nodes from 5, and
    their hosts have names."""
    return [
        impl.Place(
            f"host-{'cab'[node % 3]}{node}",
            5 + node if launcher else None,
            local_rank_of(placement, rank) if launcher else None,
        )
        for rank, node in enumerate(placement)
    ]


def shared_store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def plain(place) -> list:
    return [place.host, place.node, place.local_rank]


def nodes_of(topology) -> list[list[int]]:
    return [list(ranks) for ranks in topology.nodes]


@exercise("3.7", "virtual", asserts="place")
def test_place_comes_from_the_launcher(impl, run):
    """GROUP_RANK and LOCAL_RANK, not RANK; None for a variable that the launcher does not set."""
    given = [
        {"RANK": "6", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"},
        {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "3"},
        {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {},
    ]

    def body(ctx):
        return [plain(impl.own_place(environ, "alpha")) for environ in given]

    want = [[1, 2], [3, 1], [0, 0], [None, 1], [None, None]]
    for environ, got, (node, local) in zip(given, run(body, 1)[0], want, strict=True):
        expect_equal(got[0], "alpha", what=f"host for {environ}", cause="host")
        expect_equal(got[1], node, what=f"node for {environ}", cause="launchers-node")
        expect_equal(got[2], local, what=f"local rank for {environ}", cause="local-rank")


def told(rank: int, node: int) -> list:
    """Host (not only letters), node and local rank; None where a launcher does not say it."""
    return [f"gpu-{rank}.rack-7.example", None if rank == 2 else node, None if rank == 1 else rank]


@exercise("3.7", "virtual gloo", asserts="places store returns-when cost alone")
def test_all_ranks_get_the_same_list(impl, run, seed, cases):
    """All places in rank order on every rank, over the store alone, whichever rank is late."""

    def body(ctx):
        late = (ctx.rank * 7 + seed) % ctx.world_size
        time.sleep(0.01 * late)
        mine = impl.Place(*told(ctx.rank, late))
        store = shared_store("exchange")
        return [plain(p) for p in impl.exchange_places(mine, store, ctx.rank, ctx.world_size)]

    worlds = cases(4, 1, 2, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        want = [told(r, (r * 7 + seed) % w) for r in range(w)]
        for rank, got in enumerate(results):
            expect_equal(got, want, what=f"places of {w} ranks", rank=rank, cause="other-list")
            if results.logs[rank].events:
                fail(
                    f"rank {rank} used {results.logs[rank].events[0]}: the store alone is asked "
                    "for, so that places are known before there is a process group",
                    cause="not-the-store",
                    rank=rank,
                )


@exercise("3.7", "virtual", asserts="nodes group")
def test_hosts_make_nodes(impl, run):
    """Nodes by host name for any placement, with and without a launcher's numbers."""

    def body(ctx):
        return [
            nodes_of(impl.topology_of(places_of(impl, placement, launcher)))
            for placement in PLACEMENTS.values()
            for launcher in (True, False)
        ]

    names = [(name, launcher) for name in PLACEMENTS for launcher in (True, False)]
    for (name, launcher), got in zip(names, run(body, 1)[0], strict=True):
        placement = PLACEMENTS[name]
        told = "with" if launcher else "without"
        what = f"{name} (rank: node is {dict(enumerate(placement))}, {told} GROUP_RANK): the nodes"
        expect_equal(got, ranks_of(placement), what=what, cause="wrong-nodes")


CONTRADICTIONS = {
    "one host, two of the launcher's nodes": [("a", 0, 0), ("a", 1, 1), ("b", 2, 0), ("b", 2, 1)],
    "one of the launcher's nodes, two hosts": [("a", 0, 0), ("b", 0, 0), ("c", 1, 0), ("c", 1, 1)],
    "only some know their node": [("a", 0, 0), ("a", 0, 1), ("b", None, 0), ("b", None, 1)],
    "the same local rank twice": [("a", 0, 0), ("b", 1, 0), ("a", 0, 0), ("b", 1, 1)],
    "a local rank is missing": [("a", 0, 0), ("a", 0, 2), ("b", 1, 0), ("b", 1, 1)],
    "local ranks against rank order": [("a", 0, 1), ("a", 0, 0), ("b", 1, 0), ("b", 1, 1)],
    "the last node's local ranks": [("a", 0, 0), ("a", 0, 1), ("b", 1, 1), ("b", 1, 0)],
    "only some know their local rank": [("a", 0, 0), ("a", 0, None), ("b", 1, 0), ("b", 1, 1)],
}


@exercise("3.7", "virtual", asserts="contradictions everywhere refusals life alone")
def test_contradictions_are_refused_everywhere(impl, run):
    """Launcher and host names that disagree: a ValueError on every rank, not a guess, no hang."""

    def body(ctx):
        out = []
        for name, told in CONTRADICTIONS.items():
            mine, store = impl.Place(*told[ctx.rank]), shared_store(name)
            places = impl.exchange_places(mine, store, ctx.rank, ctx.world_size)
            try:
                impl.topology_of(places)
                out.append("")
            except ValueError:
                out.append("ValueError")
        return out

    for rank, said in enumerate(run(body, 4)):
        for (name, told), text in zip(CONTRADICTIONS.items(), said, strict=True):
            what = f"{name}, (host, node, local rank) of each rank is {told}"
            if not text:
                fail(f"{what}: expected a ValueError on every rank", cause="accepted", rank=rank)


@exercise("3.7", "virtual", asserts="locate device device-refused refusals")
def test_local_rank_chooses_the_device(impl, run):
    """GPUs are numbered from 0 on every node; the CPU where there is none."""

    def body(ctx):
        out = []
        for placement in PLACEMENTS.values():
            topology = impl.topology_of(places_of(impl, placement))
            for rank in range(len(placement)):
                devices = [str(impl.device_of(topology, rank, gpus)) for gpus in (4, 0)]
                out.append([*topology.locate(rank), *devices])
        topology = impl.topology_of(places_of(impl, (0, 1, 1, 1)))
        refused = [
            refusal(impl.device_of, topology, 1, 2),
            refusal(impl.device_of, topology, 1, 1),
            refusal(topology.locate, 4),
            refusal(topology.locate, -1),
        ]
        return out, refused, str(impl.device_of(topology, 0, 1))

    out, refused, alone = run(body, 1)[0]
    what = "the device of rank 0, alone on its node with 1 GPU; the other node has 3 ranks"
    expect_equal(alone, "cuda:0", what=what, cause="device")
    every = [(name, p, rank) for name, p in PLACEMENTS.items() for rank in range(len(p))]
    for (name, placement, rank), (node, local, gpu, cpu) in zip(every, out, strict=True):
        want = local_rank_of(placement, rank)
        index = next(k for k, ranks in enumerate(ranks_of(placement)) if rank in ranks)
        what = f"{name}, rank {rank} of {dict(enumerate(placement))}"
        expect_equal([node, local], [index, want], what=f"{what}: (node, local)", cause="locate")
        expect_equal(gpu, f"cuda:{want}", what=f"{what}: device of 4 GPUs", cause="device")
        expect_equal(cpu, "cpu", what=f"{what}: device of 0 GPUs", cause="device")
    calls = ["2 GPUs for 3 ranks on one node", "1 GPU", "locate(4) of 4 ranks", "locate(-1)"]
    expect_refusals(refused, calls, cause="not-refused")


@exercise("3.7", "virtual gloo cuda", asserts="groups number-of-groups group resources life")
def test_groups_join_nodes_and_local_ranks(impl, run, cases):
    """A group per node and one per local rank, made in one order, and usable."""
    first = "dealt out, uneven"
    names = cases(first, "dealt out in turn", "the second node is larger", "a rank per node")
    by_size = {len(PLACEMENTS[name]): PLACEMENTS[name] for name in names}

    def body(ctx):
        placement = by_size[ctx.world_size]
        topology = impl.topology_of(places_of(impl, placement))
        before = dist.distributed_c10d._world.group_count
        groups = impl.make_groups(topology)
        made = dist.distributed_c10d._world.group_count - before
        out = [made, nodes_of(groups.topology)]
        for group in (groups.node, groups.across):
            x = torch.full((1,), 2.0**ctx.rank, device=ctx.device)
            dist.all_reduce(x, group=group)
            out.append([sorted(dist.get_process_group_ranks(group)), int(x)])
        return out

    for name, results in zip(names, run.worlds(body, list(by_size)), strict=True):
        compare_groups(results, name, PLACEMENTS[name])


@exercise("3.7", "virtual", asserts="groups-refused refusals")
def test_groups_of_other_ranks_are_refused(impl, run):
    """A topology without some rank, with a rank too many, or with a rank twice:
    ValueError everywhere."""
    wrong = [((0, 1),), ((0, 1), (2, 3)), ((0, 1), (1, 2)), ((0, 1), (1,)), ((0, 3), (1,))]

    def body(ctx):
        return [refusal(impl.make_groups, impl.Topology(nodes)) for nodes in wrong]

    expect_refused(run(body, 3), [f"make_groups for nodes {n} of 3 ranks" for n in wrong])


def compare_groups(results, name: str, placement: tuple[int, ...]) -> None:
    nodes = ranks_of(placement)
    for rank, (made, got_nodes, *got) in enumerate(results):
        count = len(nodes) + max(map(len, nodes))
        what = f"{name}: groups made, one per node and one per local rank"
        expect_equal(made, count, what=what, rank=rank, cause="number-of-groups")
        local = local_rank_of(placement, rank)
        own = next(ranks for ranks in nodes if rank in ranks)
        column = sorted(ranks[local] for ranks in nodes if local < len(ranks))
        expect_equal(got_nodes, nodes, what=f"{name}: topology of the groups", rank=rank)
        for kind, members, (told, total) in zip(
            ("node", "across"), (own, column), got, strict=True
        ):
            what = f"{name} (rank: node is {dict(enumerate(placement))}): group {kind}"
            expect_equal(told, members, what=what, rank=rank, cause=f"{kind}-group")
            expect_equal(total, sum(2**r for r in members), what=f"{what}, its sum", rank=rank)


@exercise("3.7", "gloo", asserts="place places groups")
def test_on_nodes_with_host_names(impl, run, nodes):
    """Two real nodes with host names and a launcher's environment, ranks dealt out in turn."""

    def body(ctx):
        mine = impl.own_place(os.environ, socket.gethostname())
        store = shared_store("nodes")
        topology = impl.topology_of(impl.exchange_places(mine, store, ctx.rank, ctx.world_size))
        groups = impl.make_groups(topology)
        x = torch.full((1,), 2.0**ctx.rank)
        dist.all_reduce(x, group=groups.across)
        return [nodes_of(topology), int(x)]

    with nodes(2) as net:
        results = run(body, 4, enter=net.placement((0, 1, 0, 1)))
    for rank, (got, total) in enumerate(results):
        want = [[0, 2], [1, 3]]
        expect_equal(got, want, what="nodes of ranks dealt out in turn", rank=rank)
        expect_equal(total, 3 if rank < 2 else 12, what="sum over the group across", rank=rank)


@trace("3.7")
def trace_groups(impl):
    """Sums inside the nodes, then across, on 2 nodes of 2 ranks."""

    def body(ctx):
        groups = impl.make_groups(impl.topology_of(places_of(impl, (0, 0, 1, 1))))
        dist.barrier()
        ctx.start_picture()
        for name in ("node", "across"):
            with ctx.region(name):
                dist.all_reduce(torch.ones(1_000_000), group=getattr(groups, name))

    return body
