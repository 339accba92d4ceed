"""Checks of exercise 3.21: bytes and seconds of the strategies; the choice."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from given.step_profile import Phase, Profile, profile
from tests.phase3.bad_input import check_non_members
from tests.phase3.strategy_models import (
    BUCKET,
    CASES,
    LOCAL,
    NAMES,
    NODES,
    Tower,
    adam,
    batch_of,
    built,
    expect_near,
    measured,
    profiles,
)


def estimated(impl, seed: int, cases) -> list[dict[str, float]]:
    """What the implementation says before anything runs."""
    found = profiles(seed, cases)
    options = {"nodes": NODES, "ranks_per_node": LOCAL, "bucket_bytes": BUCKET}
    return [vars(impl.estimate(found[size], name, **options)).copy() for name, size in cases]


@exercise("3.21", "virtual")
def test_bytes_are_what_the_ledger_counts(impl, run, seed):
    """Bytes that a rank sends in a step, and those that leave a node."""

    cases = CASES[: len(NAMES)]

    def body(ctx):
        return estimated(impl, seed, cases)

    def reference(ctx):
        for name, size in cases:
            measured(impl, ctx, name, seed, size)

    estimates = run.simulate(body, 1)[0]
    results = run.simulate(reference, NODES * LOCAL, timeout=40)
    for said, name in zip(estimates, NAMES, strict=True):
        logs = [log.select(region=f"{name} 1") for log in results.logs]
        sent = max(sum(e.sent for e in log.events) for log in logs)
        expect_near(f"{name}: bytes sent per rank", said["sent"], sent, "bytes-sent")
        away = sent  # a ring through all ranks: one of a node's ranks sends to another node
        if name == "hybrid":
            of_node = [e for log in logs[:LOCAL] for e in log.events]
            away = sum(e.sent for e in of_node if len({r // LOCAL for r in e.group}) > 1)
        expect_near(f"{name}: bytes that leave a node", said["across"], away, "bytes-across")


def example():
    """Three units of a model with Adam: sizes that fit no power of two."""
    phases = [Phase(0, False, 10_000, 0)]
    phases += [Phase(k, False, 10_000 * k, 0) for k in (1, 2, 3)]
    phases += [Phase(0, True, 45_000, 500)]
    phases += [Phase(k, True, 10_000 * k + 700 * k, 500) for k in (3, 2, 1)]
    sizes = (9_000, 30_000, 42_000, 24_000)
    return Profile(sizes, sizes, (9_000, 700, 700, 700), 120, 2.0, 30_000, tuple(phases))


@exercise("3.21", "virtual")
def test_seconds_follow_the_slowest_link(impl, run, seed):
    """Bytes, several backward passes, and the links that they take: the docstring's table."""

    def body(ctx):
        links = impl.Links(inside=1e6, between=1e5, host=1e4)
        found = {}
        for nodes, local in ((1, 4), (2, 4), (4, 1)):
            for name in NAMES:
                for backwards in (1, 3):
                    said = impl.estimate(
                        example(), name, nodes, local, links=links, backwards=backwards
                    )
                    found[f"{nodes} {local} {name} {backwards}"] = (said.sent, said.seconds)
        return found

    whole, units = 105_000, 3 * 105_000 - 9_000 - 24_000
    for key, (sent, seconds) in run(body, 1)[0].items():
        nodes, local, k = (int(key.split()[i]) for i in (0, 1, 3))
        name, ranks = key.split()[2], nodes * local
        ring = {"ddp": 2 * whole, "zero1": 3 * whole, "zero2": (k + 1) * whole}.get(name, k * units)
        want = ring * (ranks - 1) / ranks
        took = want / (1e5 if nodes > 1 else 1e6)
        if name == "offload":
            took += ring / ranks / 1e4
        if name == "hybrid":
            inside, across = ring * (local - 1) / local, 2 * k * whole * (nodes - 1) / nodes
            want, took = inside + across / local, inside / 1e6 + across / 1e5
        where = f"{name}, {nodes} nodes of {local}, {k} backward passes"
        if abs(sent - want) > 2:
            fail(f"{where}: a rank sends {want:,.0f} B, got {sent:,.0f} B", cause="bytes-sent")
        if abs(seconds - took) > 1e-6 + 1e-3 * took:
            fail(f"{where}: {took:.3f} s on the wire, got {seconds:.3f} s", cause="seconds")


@exercise("3.21", "virtual")
def test_cheapest_that_fits_is_chosen(impl, run, seed):
    """At every budget the least seconds of those that fit; of equal ones the simpler."""

    def body(ctx, names, nodes, local, backwards):
        profile = example()
        options = {"backwards": backwards, "bucket_bytes": 20_000}
        each = [impl.estimate(profile, n, nodes, local, **options) for n in names]
        peaks = sorted({e.peak for e in each})
        out = []
        for budget in [peak + extra for peak in peaks for extra in (0, 1)]:
            got = impl.choose_strategy(profile, budget, nodes, local, **options)
            out.append((budget, got.strategy, [e.strategy for e in got.estimates], got.fits))
        return [(e.peak, e.seconds) for e in each], out

    for nodes, local, backwards in ((2, 4, 1), (1, 4, 1), (1, 4, 4), (8, 2, 3), (1, 1, 1)):
        where = f"{nodes} nodes of {local} ranks, {backwards} backward passes"
        hybrid = nodes > 1 and local > 1
        names = [n for n in NAMES if n != "hybrid" or hybrid]
        each, choices = run(body, 1, names, nodes, local, backwards)[0]
        for budget, got, shown, fits in choices:
            fitting = [(s, n) for n, (peak, s) in enumerate(each) if peak <= budget]
            want = names[min(fitting)[1]]
            what = f"{where}, {budget:,} B: the strategy"
            expect_equal(got, want, what=what, cause="not-the-cheapest")
            what = f"{where}: whether all strategies that make sense are listed, and it fits"
            expect_equal((shown == names, fits), (True, True), what=what, cause="incomplete")


@exercise("3.21", "virtual")
def test_manual_choice_is_obeyed(impl, run, seed):
    """A name instead of "auto" is taken, also where it does not fit, and the table says so."""

    def body(ctx):
        profile = example()
        roomy = impl.choose_strategy(profile, 10**9, 1, 4, strategy="hybrid")
        tight = impl.choose_strategy(profile, 1000, 2, 2, strategy="zero1")
        return [(c.strategy, c.fits, str(c).count("\n")) for c in (roomy, tight)]

    got = run(body, 1)[0]
    what = "manual hybrid and zero1: strategy, whether it fits, rows of the table"
    expect_equal(got, [("hybrid", True, 6), ("zero1", False, 6)], what=what, cause="manual")


@exercise("3.21", "virtual")
def test_bad_arguments_are_refused(impl, run):
    """A budget that nothing fits, an unknown name, no ranks, no backward: ValueError."""

    def body(ctx):
        profile = example()
        least = min((impl.estimate(profile, n, 2, 2) for n in NAMES), key=lambda e: e.peak)
        choose = impl.choose_strategy
        return least.strategy, [
            refusal(choose, profile, least.peak - 1, 2, 2),
            refusal(choose, profile, 10**9, 2, 2, strategy="zero3"),
            refusal(impl.estimate, profile, "ddp", 0, 4),
            refusal(impl.estimate, profile, "ddp", 1, 4, backwards=0),
        ]

    results = run(body, 2)
    least = results[0][0]
    calls = [
        ("a budget that nothing fits", [least, "needs"]),
        ("an unknown strategy", ["zero3"]),
        ("no node", [0]),
        ("no backward pass", [0]),
    ]
    for rank, (_, texts) in enumerate(results):
        results[rank] = texts
    expect_refused(results, calls)


@exercise("3.21", "virtual gloo cuda")
def test_ranks_agree_on_the_budget(impl, run, seed, cases):
    """Ranks with different memory free come to the least of it, in their group, in 8 bytes."""

    own = [3_000_000_000 * (7 + (rank + seed) % 4) + rank for rank in range(4)]

    def body(ctx):
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = own[ctx.rank]
        with ctx.region("agree"):
            least = impl.smallest_budget(mine, ctx.device)
        return least, impl.smallest_budget(mine, ctx.device, halves[ctx.rank // 2])

    results = run(body, 4)
    for rank, (least, half) in enumerate(results):
        expect_equal(least, min(own), what="the budget of all", rank=rank, cause="ranks-differ")
        mine = own[:2] if rank < 2 else own[2:]
        expect_equal(half, min(mine), what="a group's budget", rank=rank, cause="wrong-group")
    for log in results.logs:
        log.select(region="agree").sent_at_most(16, "all-reduce of 8 bytes")


@exercise("3.21", "virtual")
def test_who_is_no_member_is_refused(impl, run):
    """A rank outside the group gets a ValueError, not its own memory as everybody's budget."""
    calls = {"smallest_budget": lambda group: impl.smallest_budget(7, group=group)}
    check_non_members(run, calls)


@trace("3.21")
def trace_choice(impl):
    """Two steps of what is chosen for a small model on two nodes of two, with little memory."""

    def body(ctx):
        torch.manual_seed(0)
        model = Tower()
        found = profile(model, batch_of(0, 256), adam, units=list(model.blocks))
        replicated = impl.estimate(found, "ddp", NODES, LOCAL).peak
        budget = impl.smallest_budget(int(0.8 * replicated), ctx.device)
        choice = impl.choose_strategy(found, budget, NODES, LOCAL)
        if ctx.rank == 0:
            print(choice)
        wrapped, optimizer, _ = built(impl, choice.strategy)
        inputs, targets = batch_of(ctx.rank, 256)
        for step in range(2):
            if step == 1:
                ctx.start_picture()
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), targets).backward()
            optimizer.step()

    return body
