"""Checks of exercise 3.30: a program of teams that also runs by NCCL's rules."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase3.bad_input import check_non_members
from tests.phase3.reductions import warm_and_drawn

DTYPES = (torch.float64, torch.bfloat16, torch.int64)
EVERYWHERE = "virtual gloo cuda"


def edge_of(seed: int, rank: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The top (0) or the bottom (1) edge of a rank: integers, other ones for each."""
    values = torch.arange(6) + 100 * (2 * rank + number) + seed % 7
    if dtype is torch.int64:
        return values + 2**53 + 1
    return values.to(dtype) if dtype is not torch.bfloat16 else (values % 256).to(dtype)


def expect_edges(got, seed: int, ring: list[int], place: int, dtype, what: str) -> None:
    """``got``: the edge that the rank at ``place`` of ``ring`` got."""
    rank = ring[place]
    neighbours = ((ring[place - 1], 1), (ring[(place + 1) % len(ring)], 0))
    for edge, (other, number), name in zip(got, neighbours, ("before", "after"), strict=True):
        want = edge_of(seed, other, number, dtype)
        told = f"the edge of the rank {name} ({what})"
        expect_equal(edge.dtype, dtype, what=f"dtype of {told}", rank=rank, cause="dtype")
        expect_close(edge, want, what=told, rank=rank, rtol=0, atol=0)


@exercise("3.30", EVERYWHERE, nccl=True, asserts="edges ends nccl-edges dtype alone life")
def test_edges_come_from_both_neighbours(impl, run, seed, cases):
    """Each rank gets the bottom edge of the rank before and the top edge of the rank after."""

    def body(ctx):
        found = []
        for dtype in DTYPES:
            edges = [edge_of(seed, ctx.rank, k, dtype).to(ctx.device) for k in (0, 1)]
            found.append([edge.cpu() for edge in impl.swap_edges(*edges)])
        return found

    worlds = cases(3, 1, 2, 4)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, found in enumerate(results):
            for dtype, got in zip(DTYPES, found, strict=True):
                expect_edges(got, seed, [*range(w)], rank, dtype, f"{w} ranks, {dtype}")


@exercise("3.30", "virtual gloo cuda", nccl=True, asserts="cost ended resources")
def test_two_messages_per_rank(impl, run):
    """Two messages of one edge each, and every handle is waited for."""

    def body(ctx):
        edges = [torch.ones(2, 5, device=ctx.device) for _ in range(2)]
        with ctx.region("swap"):
            impl.swap_edges(*edges)
        for edge in edges:
            edge.zero_()  # theirs again

    for w in (3, 1):
        for log in run(body, w).logs:
            sent = [event for event in log.select(region="swap").events if event.op != "recv"]
            got = [(event.op, event.payload) for event in sent]
            want = [("send", 40)] * 2 if w > 1 else []
            what = f"what a rank sends with {w} ranks (operator, bytes)"
            expect_equal(got, want, what=what, rank=log.rank, cause="cost")
            log.all_waited()


@exercise("3.30", EVERYWHERE, nccl=True, asserts="layout left-alone new-tensors")
def test_edges_of_any_strides(impl, run, seed):
    """Columns of a field can be edges; they stay as they are, and new tensors come back."""

    def body(ctx):
        top, bottom = (edge_of(seed, ctx.rank, k) for k in (0, 1))
        field = torch.stack([top, bottom], 1).to(ctx.device)
        above, below = impl.swap_edges(field[:, 0], field[:, 1])
        facts = [above.is_contiguous() and below.is_contiguous(), above.device == field.device]
        zero_d = impl.swap_edges(field[ctx.rank, 0], field[ctx.rank, 1])
        same = torch.equal(field.cpu(), torch.stack([top, bottom], 1))
        own = {t.untyped_storage().data_ptr() for t in (above, below)}
        facts += [same, field.untyped_storage().data_ptr() not in own and len(own) == 2]
        return [above.cpu(), below.cpu()], facts, [edge.cpu() for edge in zero_d]

    names = ("contiguous", "on the device of the edges", "the field stayed as it was", "new ones")
    for rank, (got, facts, zero_d) in enumerate(run(body, 3)):
        expect_edges(got, seed, [0, 1, 2], rank, torch.float32, "columns of a field")
        for name, fact in zip(names, facts, strict=True):
            what = f"what came back: {name}"
            expect_equal(fact, True, what=what, rank=rank, cause="tensors")
        before, after = (rank - 1) % 3, (rank + 1) % 3
        want = [edge_of(seed, before, 1)[before], edge_of(seed, after, 0)[after]]
        for edge, one in zip(zero_d, want, strict=True):
            expect_close(edge, one, what="an edge without dimensions", rank=rank)


@exercise("3.30", EVERYWHERE, nccl=True, asserts="alone new-tensors edges-no-grad")
def test_one_rank_alone(impl, run, seed):
    """One rank alone gets contiguous copies of its own bottom and top edge, without a graph."""

    def body(ctx):
        edges = [edge_of(seed, 0, k).to(ctx.device) for k in (0, 1)]
        crossed = [edge.view(2, 3).t().requires_grad_() for edge in edges]
        for edge in impl.swap_edges(*crossed):
            if edge.requires_grad or not edge.is_contiguous():
                return [], []
        edges = [edge.detach() for edge in edges]
        got = impl.swap_edges(*edges)
        found = [edge.cpu() for edge in got]
        for edge in edges:
            edge.zero_()
        return found, [edge.cpu() for edge in got]

    answers = run(body, 1)[0]
    if answers == ([], []):
        text = "of transposed edges that require gradients, what comes back has gaps or a graph"
        fail(text, cause="tensors", rank=0)
    for what, got in zip(("", ", after its own were changed"), answers, strict=True):
        expect_edges(got, seed, [0], 0, torch.float32, f"one rank{what}")


@exercise("3.30", EVERYWHERE, nccl=True, asserts="ring group")
def test_edges_in_a_group(impl, run, seed):
    """Neighbours are ranks of the group; other ranks take no part."""
    rings = ([3, 0, 2], [1])

    def body(ctx):
        groups = [dist.new_group(ring) for ring in rings]
        edges = [edge_of(seed, ctx.rank, k).to(ctx.device) for k in (0, 1)]
        return [edge.cpu() for edge in impl.swap_edges(*edges, groups[ctx.rank == 1])]

    results = run(body, 4)
    for ring in map(sorted, rings):  # torch sorts the ranks of a group
        for place, rank in enumerate(ring):
            got = results[rank]
            expect_edges(got, seed, ring, place, torch.float32, f"group of {ring}")


@exercise("3.30", "virtual", asserts="refusals edges-refused")
def test_edges_outside_of_the_group_are_refused(impl, run):
    """A rank that is not in the group gets a ValueError, before any message."""
    call = lambda group: impl.swap_edges(torch.ones(2), torch.ones(2), group)
    check_non_members(run, {"swap_edges": call})


def members(group) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def sum_in(group, device) -> float:
    """The sum that the members make together: it shows that the group works."""
    number = torch.full((1,), 2.0 ** dist.get_rank(), device=device)
    dist.all_reduce(number, group=group)
    return number.item()


def from_before(group: dist.ProcessGroup, device: torch.device) -> float:
    """The global rank of the rank before this one in the ring of the group, by one message."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size > 1:
        number, got = (torch.full((1,), float(dist.get_rank()), device=device) for _ in "ab")
        ends = [
            dist.P2POp(dist.isend, number, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, got, group=group, group_peer=(rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        return got.item()
    return float(dist.get_rank())


@exercise("3.30", EVERYWHERE, nccl=True, asserts="teams leaders nccl-teams")
def test_teams_and_their_leaders(impl, run, cases):
    """Neighbours are a team; the first of each team are the leaders; both groups work."""

    def body(ctx, size):
        own, leaders = impl.make_teams(size)
        here, mine = [members(own), members(leaders)], [g for g in (own, leaders) if g is not None]
        sums = [sum_in(group, ctx.device) for group in mine]
        return here, sums, [from_before(group, ctx.device) for group in mine]

    for size in cases(2, 1, 4):
        for rank, (here, sums, got) in enumerate(run(body, 4, size)):
            first = rank - rank % size
            want = [[*range(first, first + size)], [] if rank % size else [*range(0, 4, size)]]
            what = f"ranks of the team and of the leaders, teams of {size}"
            expect_equal(here, want, what=what, rank=rank, cause="members")
            want_sums = [float(sum(2**r for r in ranks)) for ranks in want if ranks]
            what = f"sums in the groups, teams of {size}"
            expect_equal(sums, want_sums, what=what, rank=rank, cause="group")
            before = [float(ranks[ranks.index(rank) - 1]) for ranks in want if ranks]
            what = f"who a message in the groups is from, teams of {size}"
            expect_equal(got, before, what=what, rank=rank, cause="group")


@exercise("3.30", "virtual gloo", asserts="refusals teams-refused nothing-sent")
def test_sizes_that_do_not_divide_are_refused(impl, run):
    """ValueError on every rank unless the size divides the world size; nothing is sent."""
    sizes = (3, 0, -2, 8)

    def body(ctx):
        known = len(dist.distributed_c10d._world.pg_map)
        found = [refusal(impl.make_teams, size) for size in sizes]
        made = len(dist.distributed_c10d._world.pg_map) - known
        with ctx.region("made"):
            impl.make_teams(2)
        return found, made

    results = run(body, 4)
    for rank, (_, made) in enumerate(results):
        what = "groups made before the size is refused"
        expect_equal(made, 0, what=what, rank=rank, cause="late-check")
    results[:] = [found for found, _ in results]
    expect_refused(results, [f"teams of {size} of 4 ranks" for size in sizes])
    for log in results.logs:
        sent = [event for event in log.events if event.op not in ("store", "creation")]
        if sent:
            fail(f"rank {log.rank} sends {sent[0]}: groups need no message", cause="cost")


SAMPLES = (3, 0, 5, 2)  # of each rank


def total_of(seed: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor((seed % 11 + 1.25) * SAMPLES[rank] + rank / 4, dtype=dtype)


def expect_means(got, seed: int, rank: int, dtype: torch.dtype) -> None:
    totals = torch.stack([total_of(seed, r, dtype).double() for r in range(4)])
    counts = torch.tensor(SAMPLES, dtype=torch.float64)
    team = slice(rank - rank % 2, rank - rank % 2 + 2)
    for name, part, mean in zip(("the team", "all ranks"), (team, slice(None)), got, strict=True):
        what = f"the mean of {name} ({dtype})"
        kind = (mean.dtype, tuple(mean.shape))
        expect_equal(kind, (torch.float64, ()), what=f"kind of {what}", rank=rank, cause="dtype")
        want = totals[part].sum() / counts[part].sum()
        expect_close(mean, want, what=what, rank=rank, rtol=1e-12, atol=0)


@exercise(
    "3.30", EVERYWHERE, nccl=True, asserts="means total means-no-grad nccl-means dtype alone life"
)
def test_means_of_team_and_world(impl, run, seed):
    """Totals divided by samples, of the team and of all ranks, also where a rank has no samples."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16)

    def body(ctx):
        teams = impl.make_teams(2)
        found = []
        for dtype in dtypes:
            total = total_of(seed, ctx.rank, dtype).to(ctx.device)
            got = impl.means(total.requires_grad_(), SAMPLES[ctx.rank], teams)
            same = torch.equal(total.cpu(), total_of(seed, ctx.rank, dtype))
            found.append(
                (
                    [x.cpu() for x in got],
                    same,
                    all(x.device == total.device and not x.requires_grad for x in got),
                )
            )
        return found

    for rank, found in enumerate(run(body, 4)):
        for dtype, (got, same, there) in zip(dtypes, found, strict=True):
            expect_equal(same, True, what="total is left alone", rank=rank, cause="total")
            what = "the means are on total's device, without a graph"
            expect_equal(there, True, what=what, rank=rank, cause="device")
            expect_means(got, seed, rank, dtype)


@exercise("3.30", EVERYWHERE, nccl=True, asserts="cost host resources")
def test_means_cost_two_sums_and_no_look(impl, run):
    """Two all-reduces of 16 bytes; the host looks at no value of a GPU."""

    def body(ctx):
        teams = impl.make_teams(2)
        total = torch.ones((), device=ctx.device)
        with ctx.region("means"):
            impl.means(total, 2, teams)

    results = run(body, 4)
    for rank, log in enumerate(results.logs):
        sent = sorted((e.op, e.payload) for e in log.select(region="means").events)
        what = "what a rank sends (operator, bytes)"
        expect_equal(sent, [("all_reduce", 16)] * 2, what=what, rank=rank, cause="cost")
        log.all_waited()
    expect_few_waits(results, 0, "means", "means", copies=False)


@exercise("3.30", "virtual", asserts="both cost")
def test_both_sums_are_under_way(impl, run):
    """No sum waits for the other: a rank whose neighbour is late has issued both."""

    def body(ctx):
        teams = impl.make_teams(2)
        time.sleep(5.0 * (ctx.rank == 3))
        with ctx.region("means"):
            impl.means(torch.ones((), device=ctx.device), 1, teams)

    for rank, log in enumerate(run(body, 4).logs):
        events = log.select(region="means").events
        begun = [event.start for event in events]
        if max(begun) - min(begun) > 2.5:
            late = max(events, key=lambda event: event.start)
            text = (
                f"rank {rank} issues {late} when the sum before it has ended: both can be under way"
            )
            fail(text, cause="one-by-one", rank=rank, line=late.line)


@trace("3.30")
def trace_team_program(impl):
    """Teams of two: edges are swapped, then the means of team and world."""

    def body(ctx):
        teams = impl.make_teams(2)
        edges = [torch.ones(250_000, device=ctx.device) for _ in range(2)]
        for _ in warm_and_drawn(ctx):
            with ctx.region("edges"):
                impl.swap_edges(*edges)
            with ctx.region("means"):
                impl.means(torch.ones((), device=ctx.device), 1, teams)

    return body
