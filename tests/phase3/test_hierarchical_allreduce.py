"""Checks of exercise 3.8: an all-reduce that sends between nodes as little as possible."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.hardware.collectives import hierarchical
from distlab.netcluster import bytes_sent
from distlab.observe.log import readable
from distlab.ranks import RankResults
from distlab.virtual import load_cluster
from tests.phase3.reductions import check_layouts, whole

OPS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.double().mean(0).to(x.dtype),
    "max": lambda x: x.amax(0),
}
# the node of each rank, in rank order; of each world size one, so that one run takes them all
EVEN = [(0, 0, 1, 1), (0, 1, 2, 0, 1, 2), (0, 0, 0), (0, 1), (0,)]
UNEVEN = [(0, 0, 0, 1), (0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 0)]


def groups_of(impl, placement: tuple[int, ...]):
    """The groups for ranks placed so, by the implementation's own functions."""
    places = [
        impl.module("topology").Place(f"host{node}", node, Counter(placement[:rank])[node])
        for rank, node in enumerate(placement)
    ]
    topology = impl.module("topology")
    return topology.make_groups(topology.topology_of(places))


def ranks_of(placement: tuple[int, ...], node: int) -> list[int]:
    return [rank for rank, on in enumerate(placement) if on == node]


def values_of(seed: int, world_size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """(world_size, n): one row per rank, all negative, so that a zero would win a maximum."""
    generator = torch.Generator().manual_seed(seed * 31 + n)
    if dtype.is_floating_point:
        return -torch.rand(world_size, n, generator=generator, dtype=torch.float64).to(dtype) - 0.5
    rows = -torch.randint(1, 50, (world_size, n), generator=generator)
    return (rows - (2**58 if dtype == torch.int64 else 0)).to(dtype)


def inputs_of(placement: tuple[int, ...]) -> list[tuple[str, int, torch.dtype]]:
    """Lengths round the ranks of a node, all operators, integers and float64 as well."""
    local = max(Counter(placement).values())
    lengths = sorted({23, 1, local - 1, local, local + 1, 0}, reverse=True)
    cases = [("sum", n, torch.float32) for n in lengths]
    cases += [(op, n, torch.float32) for op in ("mean", "max") for n in (23, 1)]
    cases += [("sum", 5, torch.int32), ("max", 5, torch.int64), ("mean", 7, torch.float64)]
    return [*cases, ("sum", 5, torch.int64), ("sum", 9, torch.bfloat16), ("max", 9, torch.float16)]


def check_values(run, impl, seed: int, placements: tuple[tuple[int, ...], ...]) -> None:
    by_size = {len(placement): placement for placement in placements}

    def body(ctx):
        placement = by_size[ctx.world_size]
        groups, out = groups_of(impl, placement), []
        for op, n, dtype in inputs_of(placement):
            mine = values_of(seed, ctx.world_size, n, dtype)[ctx.rank].to(ctx.device)
            before = mine.detach()
            impl.all_reduce_hierarchical(mine, groups, op)
            out.append(before.cpu())
        return out

    for placement, results in zip(placements, run.worlds(body, list(by_size)), strict=True):
        compare_values(results, placement, seed)


def compare_values(results, placement: tuple[int, ...], seed: int) -> None:
    w = len(placement)
    for rank, outs in enumerate(results):
        for (op, n, dtype), got in zip(inputs_of(placement), outs, strict=True):
            rows = values_of(seed, w, n, dtype)
            expect_close(
                got,
                OPS[op](rows).to(dtype),
                what=f"{op} of {n} {str(dtype)[6:]} elements, node of each rank {placement}",
                rank=rank,
                before=rows[rank] if w > 1 else None,
                contributions=list(rows) if op in ("sum", "mean") else [],
            )
    for rank, outs in enumerate(results):
        for (op, n, _), got, first in zip(inputs_of(placement), outs, results[0], strict=True):
            if not torch.equal(got, first):
                fail(
                    f"{op} of {n} elements, node of each rank {placement}: rank {rank} differs "
                    "from rank 0 in the last bits; replicas would drift apart",
                    cause="order-of-summation",
                    rank=rank,
                )


@exercise(
    "3.8",
    "virtual gloo cuda",
    nccl=True,
    asserts="combine any-tensor same-bits in-place dtype group",
)
def test_even_nodes_combine(impl, run, seed, cases):
    """Sum, mean and max, any length, any placement of ranks on nodes of equal size."""
    check_values(run, impl, seed, cases(*EVEN))


@exercise("3.8", "virtual gloo cuda", nccl=True, asserts="combine any-tensor same-bits dtype group")
def test_uneven_nodes_combine(impl, run, seed, cases):
    """The same where nodes have different numbers of ranks."""
    check_values(run, impl, seed, cases(*UNEVEN))


@exercise("3.8", "virtual", asserts="any-tensor layout leaf in-place")
def test_strided_views_are_reduced_in_place(impl, run, seed):
    """Any strides: reduced in place, and nothing beside the tensor changes."""
    for placement in ((0, 1, 2), (0, 1, 0)):
        call = lambda tensor, op, _: impl.all_reduce_hierarchical(
            tensor, groups_of(impl, placement), op
        )
        check_layouts(run, seed, call, whole)


def bytes_away(log, placement: tuple[int, ...]) -> int:
    """Bytes that a rank sends to other nodes: messages there, collectives of several nodes."""
    home = placement[log.rank]
    away = 0
    for event in log.events:
        members = event.group if event.op not in ("send", "recv") else (event.peer,)
        away += event.sent * any(placement[r] != home for r in members if r is not None)
    return away


def check_budgets(run, impl, seed: int, placements: tuple[tuple[int, ...], ...], n: int) -> None:
    by_size = {len(placement): placement for placement in placements}

    def body(ctx):
        groups = groups_of(impl, by_size[ctx.world_size])
        mine = values_of(seed, ctx.world_size, n, torch.float32)[ctx.rank].to(ctx.device)
        with ctx.region("all-reduce"):
            impl.all_reduce_hierarchical(mine, groups)
        return mine.cpu()

    every = run.worlds(body, list(by_size), delays=True)
    for placement, results in zip(placements, every, strict=True):
        total = values_of(seed, len(placement), n, torch.float32).sum(0)
        compare_budgets(results, placement, total)


def compare_budgets(results, placement: tuple[int, ...], total: torch.Tensor) -> None:
    n, sizes = len(total), Counter(placement)
    nodes, local, even = len(sizes), max(sizes.values()), len(set(sizes.values())) == 1
    logs = [log.select(region="all-reduce") for log in results.logs]
    shard = -(-n // local) if even else n
    most = 2 * (nodes - 1) * -(-shard // nodes) * 4  # parts of the shard may be uneven by one
    for rank, (log, got) in enumerate(zip(logs, results, strict=True)):
        log.all_waited()
        what = f"node of each rank {placement}: sum, with delays"
        expect_close(got, total, what=what, rank=rank)
        leader = rank == min(ranks_of(placement, placement[rank]))
        away = bytes_away(log, placement)
        if not even and not leader and away:
            fail(
                f"rank {rank} is no leader of its node, but sends {readable(away)} to others",
                cause="not-the-leader",
                rank=rank,
            )
        if away > most:
            fail(
                f"node of each rank {placement}: rank {rank} sends {readable(away)} to other "
                f"nodes, expected at most {readable(most)} = 2(N-1)/N n{'/L' if even else ''}",
                cause="too-many-bytes-between-nodes",
                rank=rank,
            )
        if even:
            inside = 2 * (local - 1) * shard * 4
            if log.sent - away > inside:
                fail(
                    f"node of each rank {placement}: rank {rank} sends "
                    f"{readable(log.sent - away)} inside its node, expected at most "
                    f"{readable(inside)} = 2(L-1)/L n",
                    cause="too-many-bytes-inside",
                    rank=rank,
                )
    for node in sizes:
        away = sum(bytes_away(logs[r], placement) for r in ranks_of(placement, node))
        least = 2 * (nodes - 1) / nodes * n * 4 - 8 * local  # counts are rounded down
        if away < least:
            fail(
                f"node {node} sends {readable(away)} to others, an all-reduce takes "
                f"{readable(least)}: something came another way",
                cause="too-few-bytes",
            )


@exercise("3.8", "virtual gloo cuda", asserts="bytes waited cost resources")
def test_only_shards_leave_even_nodes(impl, run, seed, cases):
    """2(N-1)/N n/L bytes per rank between nodes, 2(L-1)/L n inside, by the ledger."""
    check_budgets(run, impl, seed, cases((0, 1, 0, 1), (0, 0, 0, 1, 1, 1)), 1001)


@exercise("3.8", "virtual", asserts="bytes waited cost")
def test_only_leaders_leave_uneven_nodes(impl, run, seed):
    """On nodes of different size the leaders alone send to other nodes, 2(N-1)/N n each."""
    check_budgets(run, impl, seed, tuple(UNEVEN), 1001)


@exercise("3.8", "virtual", asserts="refused refusals")
def test_bad_arguments_are_refused(impl, run):
    """Unknown operators and integer means raise on every rank before anything is sent."""

    def body(ctx):
        groups, reduce = groups_of(impl, EVEN[0]), impl.all_reduce_hierarchical
        with ctx.region("refused"):
            return [
                refusal(reduce, torch.ones(3, dtype=torch.int64), groups, "mean"),
                refusal(reduce, torch.ones(3), groups, "median"),
            ]

    results = run(body, 4)
    logs = [log.select(region="refused") for log in results.logs]
    refused = RankResults([*results], logs, results.output)
    expect_refused(refused, ["the mean of integers", "the operator median"])


@exercise("3.8", "virtual", asserts="shards leaders unchanged life")
def test_both_ways_leave_the_input_alone(impl, run, seed):
    """Shards and leaders give the combination in a tensor of its own; flat stays as it was."""

    def body(ctx):
        found = []
        for placement in (EVEN[0], (0, 1, 0, 1)):
            groups = groups_of(impl, placement)
            for way in (impl.reduce_by_shards, impl.reduce_through_leaders):
                for op in OPS:
                    flat = values_of(seed, 4, 7, torch.float32)[ctx.rank]
                    found.append((way(flat, groups, op), flat))
        return found

    rows = values_of(seed, 4, 7, torch.float32)
    names = [f"{op} {way}" for way in ("by shards", "through leaders") for op in OPS] * 2
    for rank, found in enumerate(run(body, 4)):
        for name, (got, flat) in zip(names, found, strict=True):
            want = OPS[name.split()[0]](rows)
            expect_close(got, want, what=name, rank=rank, contributions=list(rows))
            kept = torch.equal(flat, rows[rank])
            expect_equal(kept, True, what=f"{name}: flat kept", rank=rank, cause="input-changed")


@exercise("3.8", "virtual gloo", asserts="check refusals alone life")
def test_tensors_that_differ_are_refused_on_every_rank(impl, run, cases):
    """With check=True other lengths or dtypes on rank 1 are a ValueError everywhere; no hang."""
    other = {
        "4 elements instead of 3": torch.ones(4),
        "no element instead of 3": torch.ones(0),
        "int32 instead of float32": torch.ones(3, dtype=torch.int32),
    }

    def body(ctx, placement):
        groups, out = groups_of(impl, placement), []
        for tensor in other.values():
            mine = tensor if ctx.rank == 1 else torch.ones(3)
            out.append(refusal(impl.all_reduce_hierarchical, mine, groups, check=True))
        alike = torch.ones(3)
        impl.all_reduce_hierarchical(alike, groups, check=True)
        return out, alike

    for placement in cases(EVEN[0], UNEVEN[0]):
        for rank, (refusals, alike) in enumerate(run(body, 4, placement)):
            expect_refusals(refusals, [f"on rank 1 {what}" for what in other], rank=rank)
            expect_close(alike, torch.full((3,), 4.0), what="tensors that agree", rank=rank)


def flat_ring(tensor: torch.Tensor) -> None:
    """All-reduce (sum) by a ring through all ranks that knows nothing of nodes."""
    rank, w = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.tensor_split(w))
    for step in range(2 * (w - 1)):
        out, into = chunks[(rank - step) % w], chunks[(rank - step - 1) % w]
        received = torch.empty_like(into)
        handle = dist.isend(out, (rank + 1) % w)
        dist.recv(received, (rank - 1) % w)
        handle.wait()
        into.copy_(into + received if step < w - 1 else received)


@exercise("3.8", "virtual", asserts="bytes cost")
def test_virtual_cluster_is_faster_than_a_flat_ring(impl, run):
    """In virtual time, on nodes with one network card and with one per GPU; bytes by link."""
    n, local = 1_000_000, 4
    for name, cards in (("ethernet-v100", 1), ("dgx-h100", local)):
        model = dataclasses.replace(
            load_cluster(name), gpus_per_node=local, nics_per_node=cards, launch=0.0
        )
        placement = tuple(rank // local for rank in range(2 * local))

        def body(ctx):
            impl.all_reduce_hierarchical(torch.ones(n), groups_of(impl, placement))

        def reference(ctx):
            flat_ring(torch.ones(n))

        ours = run.simulate(body, 2 * local, cluster=model)
        ring = run.simulate(reference, 2 * local, cluster=model)
        what = f"{4 * n / 1e6:.0f} MB on 2 nodes of {local} GPUs, {cards} network card(s) each"
        left, crossed = ours.traffic["nic out"] / 2, 4 * n
        if not 0.99 * crossed <= left <= 1.01 * crossed:
            fail(
                f"{what}: each node sends {readable(left)}, expected {readable(crossed)} = "
                "2(N-1)/N n",
                cause="too-many-bytes-between-nodes" if left > crossed else "too-few-bytes",
            )
        least = hierarchical(4 * n, (2 * local, 2, local), model)
        if ours.clock > 0.9 * ring.clock:
            fail(
                f"{what}: {ours.clock * 1e3:.2f} ms, a flat ring takes {ring.clock * 1e3:.2f} ms, "
                f"and the formula says {least * 1e3:.2f} ms",
                cause="no-faster",
            )


@exercise("3.8", "virtual", asserts="formula formula-refused")
def test_bytes_leaving_a_node(impl, run):
    """The formulas for the flat ring and for this module's all-reduce."""
    placements = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0,), (0, 0), (0, 1, 2), (0, 0, 1, 2)]
    placements.append((0, 1, 0, 2, 0, 1))  # the ring leaves the first node more often

    def body(ctx):
        out = []
        for placement in placements:
            nodes = tuple(tuple(ranks_of(placement, k)) for k in dict.fromkeys(placement))
            topology = impl.module("topology").Topology(nodes)
            names = ("ring", "hierarchical")
            out.append([float(impl.bytes_leaving_a_node(topology, 1200, a)) for a in names])
        try:
            impl.bytes_leaving_a_node(topology, 1200, "star")
            return out, "accepted"
        except ValueError:
            return out, ""

    got, star = run(body, 1)[0]
    want = [
        [1800, 1200], [3600, 1200], [1800, 1200], [0, 0], [0, 0], [1600, 1600], [1800, 1600],
        [6000, 1600],
    ]  # fmt: skip
    for placement, told, right in zip(placements, got, want, strict=True):
        what = f"1200 bytes, node of each rank {placement}: bytes leaving a node"
        for name, a, b in zip(("ring", "hierarchical"), told, right, strict=True):
            if abs(a - b) > 1e-6:
                fail(f"{what}, {name}: expected {b}, got {a}", cause=f"formula-{name}")
    expect_equal(star, "", what="an unknown algorithm", cause="not-refused")


@exercise("3.8", "gloo", asserts="bytes cost")
def test_shaped_link_carries_what_the_formula_says(impl, run, nodes):
    """Two nodes with a real link between them: bytes on the wire, against a flat ring's."""
    n, placement = 500_000, (0, 0, 1, 1)

    def measured(all_reduce):
        x = torch.ones(n)
        all_reduce(torch.ones(8))  # opens the connections
        dist.barrier()
        before = bytes_sent()
        all_reduce(x)
        dist.barrier()
        return bytes_sent() - before, x.sum().item()

    def body(ctx):
        groups = groups_of(impl, placement)
        return measured(lambda x: impl.all_reduce_hierarchical(x, groups))

    def reference(ctx):
        return measured(flat_ring)

    with nodes(2, rate="500mbit") as net:
        results = run(body, 4, enter=net.placement(placement))
        rings = run(reference, 4, enter=net.placement(placement))
    for rank, (ours, total) in enumerate(results):
        ring, _ = rings[rank]
        expect_equal(total, 4.0 * n, what="sum of all elements", rank=rank)
        want = 4 * n
        if not 0.9 * want <= ours <= 1.15 * want:
            fail(
                f"the node of rank {rank} sent {readable(ours)} over its link, expected "
                f"{readable(want)} = 2(N-1)/N n; a flat ring sent {readable(ring)}",
                cause="too-many-bytes-between-nodes" if ours > want else "too-few-bytes",
                rank=rank,
            )


@trace("3.8")
def trace_hierarchical(impl):
    """The three stages on 2 nodes of 2 ranks, then through leaders on nodes of 3 and 1."""

    def body(ctx):
        for placement in ((0, 0, 1, 1), (0, 0, 0, 1)):
            groups = groups_of(impl, placement)
            dist.barrier()
            if placement == (0, 0, 1, 1):
                ctx.start_picture()
            with ctx.region("even" if groups.topology.even else "uneven"):
                impl.all_reduce_hierarchical(torch.ones(1_000_000), groups)

    return body
