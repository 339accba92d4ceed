"""Checks of exercise 3.21: bytes and seconds of the strategies; the choice."""

from __future__ import annotations

from dataclasses import replace

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
    """The implementation's estimate before anything runs."""
    found = profiles(seed, cases)
    options = {"nodes": NODES, "ranks_per_node": LOCAL, "bucket_bytes": BUCKET}
    return [vars(impl.estimate(found[size], name, **options)).copy() for name, size in cases]


@exercise("3.21", "virtual", asserts="sent-bytes")
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


def frozen_example():
    """The same, with the second unit frozen."""
    sizes = (9_000, 30_000, 0, 24_000)
    return replace(example(), gradients=sizes, largest=(9_000, 700, 0, 700))


def root_example():
    """A model without any unit but the root."""
    phases = (Phase(0, False, 10_000, 0), Phase(0, True, 45_000, 500))
    return Profile((9_001,), (9_001,), (700,), 120, 2.0, 30_000, phases)


def unit_example():
    """A root and one unit, which runs last."""
    sizes = (9_001, 30_003)
    return replace(root_example(), parameters=sizes, gradients=sizes, largest=(700, 700))


PROFILES = {
    "trainable": example,
    "partly frozen": frozen_example,
    "only a root": root_example,
    "one unit": unit_example,
}


@exercise("3.21", "virtual", asserts="sent-bytes across-bytes seconds cost parameters")
def test_seconds_follow_the_slowest_link(impl, run, seed):
    """Bytes, several backward passes, and the links that they take: the docstring's table."""

    pairs = ((1e6, 1e5), (1e5, 1e6))

    def body(ctx):
        found = {}
        for which, make in PROFILES.items():
            for nodes, local in ((1, 4), (2, 4), (4, 1), (1, 1)):
                for name in NAMES:
                    for k in (1, 3):
                        for n, (inside, between) in enumerate(pairs):
                            links = impl.Links(inside=inside, between=between, host=1e4)
                            said = impl.estimate(
                                make(), name, nodes, local, links=links, backwards=k
                            )
                            key = f"{which}, {nodes}, {local}, {name}, {k}, {n}"
                            found[key] = (said.sent, said.across, said.seconds)
        return found

    for key, got in run(body, 1)[0].items():
        which, *numbers, name, k, n = key.split(", ")
        nodes, local, k = int(numbers[0]), int(numbers[1]), int(k)
        where = f"{which}: {name}, {nodes} nodes of {local}, {k} backward passes"
        want = priced(PROFILES[which](), name, nodes, local, k, *pairs[int(n)])
        for what, said, right in zip(("sent per rank", "across", "wire"), got, want, strict=True):
            if what == "wire" and abs(said - right) > 1e-9 + 1e-3 * right:
                text = f"{where}: {right:.6g} s on the wire, got {said:.6g} s"
                fail(text, cause="seconds")
            near = right - 1.001 < said < right + 0.001
            if what != "wire" and not (near and isinstance(said, int)):
                text = f"{where}: bytes {what}: expected {right:,.1f} rounded down, got {said!r}"
                fail(text, cause="bytes-across" if what == "across" else "bytes-sent")


def priced(p, name: str, nodes: int, local: int, k: int, inside: float, between: float):
    """(sent, across, seconds) by the docstring."""
    ranks, trained = nodes * local, sum(p.gradients)
    last = p.parameters[-1] if len(p.parameters) > 1 else 0
    units = k * (2 * sum(p.parameters) - p.parameters[0] - last + trained)
    passed = {"ddp": 2 * trained, "zero1": 3 * trained, "zero2": (k + 1) * trained}
    ring = passed.get(name, units)
    if name == "hybrid":
        within = ring * (local - 1) / local
        across = 2 * k * trained * (nodes - 1) / nodes
        return within + across / local, across, within / inside + across / between
    sent = ring * (ranks - 1) / ranks
    seconds = sent / (inside if nodes == 1 else min(inside, between))
    seconds += ring / ranks / 1e4 if name == "offload" else 0.0
    return sent, sent if nodes > 1 else 0, seconds


@exercise("3.21", "virtual", asserts="cheapest simpler fits-exactly lists-all")
def test_cheapest_that_fits_is_chosen(impl, run, seed):
    """At every budget the fastest strategy that fits; of equally fast ones the simpler."""

    def body(ctx, names, nodes, local, backwards):
        profile = example()
        links = impl.Links(inside=1e6, between=1e6 if nodes == 3 else 1e5, host=1e4)
        options = {"backwards": backwards, "bucket_bytes": 20_000, "links": links}
        each = [impl.estimate(profile, n, nodes, local, **options) for n in names]
        peaks = sorted({e.peak for e in each})
        out = []
        for budget in [peak + extra for peak in peaks for extra in (0, 1)]:
            try:
                got = impl.choose_strategy(profile, budget, nodes, local, **options)
            except ValueError as error:
                out.append((budget, f"ValueError: {error}", None, None))
                continue
            same = list(got.estimates) == each and got.budget == budget
            shown = [e.strategy for e in got.estimates]
            out.append((budget, got.strategy, shown, got.fits and same))
        out += [impl.choose_strategy(profile, 0, nodes, local, strategy=n).strategy for n in names]
        return [(e.peak, e.seconds) for e in each], out

    for nodes, local, backwards in (
        *((2, 4, 1), (1, 4, 1), (1, 4, 4), (8, 2, 3), (1, 1, 1), (4, 1, 1), (3, 2, 2)),
    ):
        where = f"{nodes} nodes of {local} ranks, {backwards} backward passes"
        hybrid = nodes > 1 and local > 1
        names = [n for n in NAMES if n != "hybrid" or hybrid]
        each, choices = run(body, 1, names, nodes, local, backwards)[0]
        byhand = "strategies that were asked for"
        expect_equal(choices[-len(names) :], names, what=f"{where}: {byhand}", cause="manual")
        for budget, got, shown, fits in choices[: -len(names)]:
            fitting = [(s, n) for n, (peak, s) in enumerate(each) if peak <= budget]
            want = names[min(fitting)[1]]
            if shown is None:
                text = f"{where}: a budget of {budget:,} B is refused, though {want} fits: {got}"
                fail(text, cause="refused-though-it-fits")
            what = f"{where}, {budget:,} B: the strategy"
            expect_equal(got, want, what=what, cause="not-the-cheapest")
            what = f"{where}: whether all strategies that make sense are listed, as estimated, "
            what += "and the choice fits"
            expect_equal((shown == names, fits), (True, True), what=what, cause="incomplete")


@exercise("3.21", "virtual", asserts="by-hand output")
def test_manual_choice_is_obeyed(impl, run, seed):
    """A name instead of "auto" is taken, also where it does not fit, and the table says so."""

    def body(ctx):
        profile = example()
        roomy = impl.choose_strategy(profile, 10**9, 1, 4, strategy="hybrid")
        tight = impl.choose_strategy(profile, 1000, 2, 2, strategy="zero1")
        options = {"links": impl.Links(2e6, 1e5, 3e4), "backwards": 3, "bucket_bytes": 9_000}
        asked = impl.choose_strategy(profile, 12_345, 2, 2, strategy="offload", **options)
        each = [impl.estimate(profile, n, 2, 2, **options) for n in NAMES]
        as_asked = list(asked.estimates) == each, asked.budget
        names = [each.strategy for each in roomy.estimates]
        told = [(c.strategy, c.fits, str(c).count("\n")) for c in (roomy, tight)]
        return told, as_asked, names

    got, as_asked, names = run(body, 1)[0]
    what = "manual hybrid on one node: estimates in the order of STRATEGIES"
    expect_equal(names, [n for n in NAMES if n in names], what=what, cause="manual")
    what = "manual offload: estimates are those of the links, passes and buckets given; budget"
    expect_equal(as_asked, (True, 12_345), what=what, cause="manual")
    what = "manual hybrid and zero1: strategy, whether it fits, rows of the table"
    expect_equal(got, [("hybrid", True, 6), ("zero1", False, 6)], what=what, cause="manual")


@exercise("3.21", "virtual", asserts="choice-refused choice-silent refusals")
def test_bad_arguments_are_refused(impl, run):
    """A budget that nothing fits, an unknown name, no ranks, no backward: ValueError."""

    def body(ctx):
        profile = example()
        least = min((impl.estimate(profile, n, 2, 2) for n in NAMES), key=lambda e: e.peak)
        choose = impl.choose_strategy
        return [
            refusal(choose, profile, least.peak - 1, 2, 2),
            refusal(choose, profile, 10**9, 2, 2, strategy="zero3"),
            refusal(impl.estimate, profile, "ddp", 0, 4),
            refusal(impl.estimate, profile, "ddp", 1, 4, backwards=0),
            refusal(choose, profile, 10**9, 2, 0, strategy="ddp"),
        ]

    results = run(body, 2)
    calls = [
        "a budget that nothing fits",
        "an unknown strategy",
        "no node",
        "no backward pass",
        "a strategy by hand on no rank",
    ]
    expect_refused(results, calls)


@exercise("3.21", "virtual gloo cuda", nccl=True, asserts="least exact dtype group")
def test_ranks_agree_on_the_budget(impl, run, seed, cases):
    """Ranks with different free memory agree on the least of it, in their group, in 8 bytes."""

    own = [2**53 + 3_000 * (7 + (rank + seed) % 4) + 2 * rank + 1 for rank in range(4)]

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        mine = own[ctx.rank]
        with ctx.region("agree"):
            least = impl.smallest_budget(mine, ctx.device)
        return least, impl.smallest_budget(mine, ctx.device, groups[ctx.rank % 2 == 0])

    results = run(body, 4)
    agreed = len({least for least, _ in results}) == 1
    for rank, (least, of_group) in enumerate(results):
        if type(least) is not int:
            text = f"the budget on rank {rank} is a {type(least).__name__}, expected an int"
            fail(text, cause="type", rank=rank)
        cause = "not-the-least" if agreed else "ranks-differ"
        expect_equal(least, min(own), what="the budget of all", rank=rank, cause=cause)
        want = min(own[rank], own[(rank + 2) % 4])
        expect_equal(of_group, want, what="a group's budget", rank=rank, cause="wrong-group")
    for log in results.logs:
        events = [(e.op, e.payload) for e in log.select(region="agree").events]
        what = "messages: (operator, bytes)"
        expect_equal(events, [("all_reduce", 8)], what=what, rank=log.rank, cause="cost")


@exercise("3.21", "virtual", asserts="member-refused refusals alone")
def test_who_is_no_member_is_refused(impl, run):
    """A rank outside the group gets a ValueError, not its own memory as everybody's budget."""
    calls = {"smallest_budget": lambda group: impl.smallest_budget(7, group=group)}
    check_non_members(run, calls)


@trace("3.21")
def trace_choice(impl):
    """Two steps of the chosen strategy for a small model on two nodes of
    two, with little memory."""

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
