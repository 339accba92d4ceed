"""Checks of exercises 2.9 and 2.21: schedules as data, completed, validated, timed and counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from tests.phase2.pipeline_orders import (
    Plain,
    any_order,
    as_steps,
    bubble,
    completed,
    one_after_another,
    peaks,
    placement,
    plain,
    problem_of,
    times,
)

Schedule = list[list[Plain]]
COSTS = {"F": 1.0, "B": 2.0}
SPLIT = {"F": 1.0, "B": 1.0, "W": 1.0}


def all_forwards_first(ranks: int, m: int) -> Schedule:
    return [[(k, r, i) for k in "FB" for i in range(m)] for r in range(ranks)]


def one_forward_one_backward() -> Schedule:
    """Rank 0 sends an activation while rank 1 sends a gradient: of orders by chance, few do."""
    kinds = ("FFBFBFBB", "FBFBFBFB")
    return [
        [(kind, rank, steps[:at].count(kind)) for at, kind in enumerate(steps)]
        for rank, steps in enumerate(kinds)
    ]


def weights_last(ranks: int, m: int) -> Schedule:
    order = one_after_another(ranks, m)
    return [[*steps, *(("W", r, i) for i in range(m))] for r, steps in enumerate(order)]


def orders(seed: int) -> list[tuple[str, int, int, Schedule]]:
    """(name, stages, micro-batches, order): regular schedules, and some random ones."""
    found = [
        ("all forwards first, 4 ranks", 4, 3, all_forwards_first(4, 3)),
        ("one micro-batch after another, 3 ranks", 3, 4, one_after_another(3, 4)),
        ("one forward, one backward, 2 ranks", 2, 4, one_forward_one_backward()),
        ("one rank, one stage", 1, 2, all_forwards_first(1, 2)),
        ("one rank with three stages", 3, 2, any_order(seed, [0, 0, 0], 2)),
        ("the only order of three stages on a rank", 3, 1, any_order(seed, [0, 0, 0], 1)),
        ("all weights last, 2 ranks", 2, 3, weights_last(2, 3)),
        ("one rank with steps W", 2, 2, any_order(seed, [0, 0], 2, "FBW")),
        ("one rank with one step W", 1, 1, [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]]),
    ]
    for number, (kind, ranks, chunks, m, kinds) in enumerate(
        [
            ("round", 2, 1, 4, "FB"),
            ("round", 5, 1, 3, "FB"),
            ("round", 3, 2, 3, "FB"),
            ("v", 2, 2, 4, "FB"),
            ("block", 2, 2, 3, "FB"),
            ("round", 3, 1, 4, "FBW"),
            ("v", 3, 2, 2, "FBW"),
            ("idle", 3, 1, 3, "FB"),
            ("idle", 2, 2, 2, "FBW"),
            ("idle ends", 3, 1, 3, "FB"),
        ]
    ):
        rank_of = placement("round" if kind.startswith("idle") else kind, ranks, chunks)
        if kind == "idle":  # rank 1 has no stages
            rank_of = [rank + (rank > 0) for rank in rank_of]
        if kind == "idle ends":  # the first rank has none, nor has the last, and stages fall
            rank_of = [ranks - rank for rank in rank_of]
        order = any_order(seed + number, rank_of, m, kinds)
        order += [[]] if kind == "idle ends" else []
        name = f"{ranks} ranks with {chunks} stages each ({kind}), steps {kinds}, by chance"
        found.append((name, ranks * chunks, m, order))
    return found


def given(impl, schedule: Schedule) -> tuple:
    """Steps of a schedule that can't be changed."""
    return tuple(map(tuple, as_steps(impl, schedule)))


# -- messages -------------------------------------------------------------------------------------
@exercise("2.9", "gloo", asserts="steps-stay crossings runnable untouched alone cost life")
def test_messages_make_an_order_runnable(impl, run, seed):
    """Every crossing of ranks is sent and received once, and rendezvous sends don't deadlock."""
    known = orders(seed)

    def body(ctx):
        empty = plain(impl.with_messages(((), ())))
        step = impl.module("pipeline_schedules").Step
        found, new = [], []
        for _, _, _, order in known:
            steps = as_steps(impl, order)
            made = impl.with_messages(steps)
            new.append(not any(a is b for a in made for b in steps) and plain(steps) == order)
            new[-1] &= all(isinstance(each, step) for steps in made for each in steps)
            found.append(plain(impl.with_messages(given(impl, order))))
        return found, empty, new

    ((results, empty, new),) = run(body, 1, process_group=False, ledger=False)
    expect_equal(empty, [[], []], what="two ranks without steps", cause="order-changed")
    for (name, *_), good in zip(known, new, strict=True):
        what = f"{name}, as lists: whether the result is new lists of Step, and the order stays"
        expect_equal(good, True, what=what, cause="order-changed")
    for (name, stages, m, order), got in zip(known, results, strict=True):
        compute = [[step for step in steps if len(step[0]) == 1] for steps in got]
        expect_equal(compute, order, what=f"{name}: the compute steps", cause="order-changed")
        cause, text = problem_of(got, stages, m)
        if cause:
            fail(f"{name}: {text}", cause=cause)


def check_impossible_orders(impl, run, name: str) -> None:
    cyclic = [
        [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)],
        [("F", 1, 1), ("B", 1, 1), ("F", 1, 0), ("B", 1, 0)],
    ]
    impossible = {
        "a cycle": cyclic,
        "backward before its forward": [[("B", 0, 0), ("F", 0, 0)]],
        "weights before their backward": [[("F", 0, 0), ("W", 0, 0), ("B", 0, 0)]],
        "a forward that is nowhere": [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 1)]],
        "a stage on two ranks": [[("F", 0, 0)], [("B", 0, 0)]],
        "a stage that is nowhere": [[("F", 0, 0)], [("F", 2, 0)]],
        "a backward that is nowhere": [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0)]],
        "no first stage": [[("F", 1, 0), ("B", 1, 0)]],
    }

    def body(ctx):
        made = getattr(impl, name)
        return [refusal(made, given(impl, order)) for order in impossible.values()]

    (refused,) = run(body, 1, process_group=False, ledger=False)
    expect_refusals(refused, [f"{name} of {order}" for order in impossible])


@exercise("2.9", "gloo", asserts="impossible refusals")
def test_impossible_orders_are_refused(impl, run):
    """Ranks that wait for each other, or a backward before its forward: ValueError, no hang."""
    check_impossible_orders(impl, run, "with_messages")


@exercise("2.21", "gloo", asserts="impossible refusals")
def test_replay_refuses_impossible_orders(impl, run):
    """Ranks that wait for each other, or a backward before its forward: ValueError, no hang."""
    check_impossible_orders(impl, run, "replay")


# -- the validator --------------------------------------------------------------------------------
def verdicts(impl, run, schedules: Sequence[tuple[Schedule, int, int]]) -> list[str | None]:
    """The answer of validate to each: None, or the text of its ValueError. It sees each twice."""

    def body(ctx):
        said = []
        for schedule, stages, m in schedules:
            try:
                for _ in range(2):
                    impl.validate(given(impl, schedule), stages, m)
                said.append(None)
            except ValueError as error:
                said.append(str(error) or "no reason")
        return said

    return run(body, 1, process_group=False, ledger=False)[0]


@exercise("2.9", "gloo", asserts="accepts untouched alone life")
def test_valid_schedules_are_accepted(impl, run, seed):
    """Whatever the order and the position of the messages: a schedule that can run is valid."""
    cases = [
        (completed(seed + k, order), stages, m)
        for _, stages, m, order in orders(seed)
        for k in range(3)
    ]
    cases += [case for case, fault in edited(seed) if not fault]
    for (schedule, _, _), text in zip(cases, verdicts(impl, run, cases), strict=True):
        if text is not None:
            fail(f"a valid schedule is refused ({text}):\n{_lines(schedule)}", cause="refused")


def edited(seed: int) -> list[tuple[tuple[Schedule, int, int], str]]:
    """Valid schedules with one random step moved, left out or repeated, and the fault."""
    draws = random.Random(seed)
    found = []
    for _, stages, m, order in orders(seed):
        valid = completed(seed, order)
        for _ in range(20):
            schedule = [list(steps) for steps in valid]
            steps = draws.choice([steps for steps in schedule if len(steps) > 1])
            place = draws.randrange(len(steps))
            step = steps.pop(place)
            how = draws.random()
            if how < 0.5:  # a neighbour, or anywhere
                steps.insert(max(0, place + draws.choice((-1, 1))), step)
            elif how < 0.8:
                steps.insert(draws.randrange(len(steps) + 1), step)
            elif how < 0.9:
                steps.insert(place, step)
                steps.insert(draws.randrange(len(steps) + 1), step)
            cause, text = problem_of(schedule, stages, m)
            found.append(((schedule, stages, m), text and f"{cause}: {text}"))
    return found


def _lines(schedule: Schedule) -> str:
    return "\n".join(f"  rank {r}: {_line(steps)}" for r, steps in enumerate(schedule))


def _line(steps: Sequence[Plain]) -> str:
    return ", ".join(f"{k}({s}, {i})" for k, s, i in steps)


def changed(edit: Callable[[Schedule], object], m: int = 2) -> Schedule:
    """Two ranks, all forwards first, with messages; then edited."""
    sends = [[("F", 0, i), ("send F", 0, i)] for i in range(m)]
    receives = [[("recv F", 1, i), ("F", 1, i)] for i in range(m)]
    back = [[("recv B", 0, i), ("B", 0, i)] for i in range(m)]
    forth = [[("B", 1, i), ("send B", 1, i)] for i in range(m)]
    schedule = [list(chain(*sends, *back)), list(chain(*receives, *forth))]
    edit(schedule)
    return schedule


def swap(schedule: Schedule, rank: int, a: Plain, b: Plain) -> None:
    steps = schedule[rank]
    x, y = steps.index(a), steps.index(b)
    steps[x], steps[y] = steps[y], steps[x]


def crossed(schedule: Schedule) -> None:
    """Both ranks send first: each send waits for a receive that comes after the other's send."""
    schedule[:] = [
        [("F", 0, 0), ("send F", 0, 0), ("F", 0, 1), ("send F", 0, 1), ("recv B", 0, 0)],
        [("recv F", 1, 0), ("F", 1, 0), ("B", 1, 0), ("send B", 1, 0), ("recv F", 1, 1)],
    ]
    schedule[0] += [("B", 0, 0), ("recv B", 0, 1), ("B", 0, 1)]
    schedule[1] += [("F", 1, 1), ("B", 1, 1), ("send B", 1, 1)]


BROKEN: dict[str, Callable[[Schedule], object]] = {
    "empty": lambda s: s.__setitem__(slice(None), [[], []]),
    "forward-missing": lambda s: s[1].remove(("F", 1, 1)),
    "backward-missing": lambda s: s[0].remove(("B", 0, 1)),
    "micro-batch-missing": lambda s: s.__setitem__(
        slice(None), [[x for x in steps if x[2] == 0] for steps in s]
    ),
    "backward-twice": lambda s: s[0].append(("B", 0, 1)),
    "too-many-micro-batches": lambda s: s.__setitem__(slice(None), changed(lambda _: None, 3)),
    "receive-missing": lambda s: s[1].remove(("recv F", 1, 1)),
    "send-missing": lambda s: s[1].remove(("send B", 1, 0)),
    "sent-twice": lambda s: s[0].insert(2, ("send F", 0, 0)),
    "message-to-nobody": lambda s: s[1].append(("send F", 1, 1)),
    "sent-before-computed": lambda s: swap(s, 0, ("F", 0, 0), ("send F", 0, 0)),
    "received-after-use": lambda s: swap(s, 1, ("recv F", 1, 0), ("F", 1, 0)),
    "backward-before-forward": lambda s: swap(s, 1, ("F", 1, 0), ("B", 1, 0)),
    "messages-swapped": lambda s: swap(s, 1, ("recv F", 1, 0), ("recv F", 1, 1)),
    "gradients-swapped": lambda s: swap(s, 0, ("recv B", 0, 0), ("recv B", 0, 1)),
    "deadlock": crossed,
    "stage-on-two-ranks": lambda s: (s[0].remove(("B", 0, 1)), s[1].append(("B", 0, 1))),
    "weights-missing": lambda s: s[0].append(("W", 0, 0)),
    "unknown-step": lambda s: s[0].append(("optimizer", 0, 0)),
    "message-from-another-rank": lambda s: (
        s[0].remove(("send F", 0, 1)),
        s[1].insert(0, ("send F", 0, 1)),
    ),
    "message-to-another-rank": lambda s: (
        s[1].remove(("recv F", 1, 1)),
        s[0].append(("recv F", 1, 1)),
    ),
    "micro-batch-minus-one": lambda s: s[0].append(("F", 0, -1)),
    "receive-before-what-it-answers": lambda s: (
        s[0].remove(("recv B", 0, 0)),
        s[0].insert(1, ("recv B", 0, 0)),
    ),
}


@exercise("2.9", "gloo", asserts="complete numbers before-after meets refusals")
def test_broken_schedules_are_refused(impl, run, seed):
    """Incomplete, doubled, out of order, messages that don't meet, deadlocks: each is named."""
    cases = [(changed(edit), 2, 2) for edit in BROKEN.values()]
    split = [[("F", 0, 0), ("W", 0, 0), ("B", 0, 0)]]
    local = [[("F", 0, 0), ("send F", 0, 0), ("recv F", 1, 0), ("F", 1, 0)]]
    local[0] += [("B", 1, 0), ("B", 0, 0)]
    valid = changed(lambda _: None)
    cases += [(split, 1, 1), ([], 0, 0), ([[]], 1, 0), (local, 2, 1)]
    cases += [(valid, 3, 2), (valid, 1, 2), (valid, 2, 1), (valid, 2, 3), (valid, -1, 2)]
    names = [*BROKEN, "weights-before-backward", "no-stages", "no-micro-batches"]
    names += ["message-within-a-rank", "too-few-stages", "too-many-stages"]
    names += ["too-many-micro-batches", "too-few-micro-batches", "negative-stages"]
    for case, fault in edited(seed):
        if fault:
            cases.append(case)
            names.append(fault)
    for name, (schedule, _, _), text in zip(names, cases, verdicts(impl, run, cases), strict=True):
        if text is None:
            what, cause = name.replace("-", " "), name.partition(":")[0]
            text = f"validate accepts a schedule with the fault '{what}':\n{_lines(schedule)}"
            fail(text, cause=cause)


# -- time and memory ------------------------------------------------------------------------------
@exercise("2.21", "gloo", asserts="replay costs bubble untouched alone life")
def test_replay_gives_the_bubble(impl, run, seed):
    """Ends of all steps, total time and bubble, for given costs and a given time per message."""
    draws = random.Random(seed)
    cases = []
    for name, _, _, order in orders(seed):
        split = any(step[0] == "W" for steps in order for step in steps)
        costs = {k: draws.randint(1, 5) / 2 for k in ("FBW" if split else "FB")}
        cases += [(name, order, costs, 0.0), (name, completed(seed, order), costs, 0.75)]
        cases.append((name, order, None, 0.0))
        some = dict.fromkeys(costs, 0.0) | {"B": 1.25}  # a kind may take no time
        cases.append((name, order, some, 0.125))
    own = one_after_another(3, 3)
    own[1] = [step for i in range(3) for step in (*own[1][2 * i : 2 * i + 2], ("W", 1, i))]
    cases.append(("steps W on rank 1 only", own, None, 0.0))
    forwards = any_order(seed, placement("v", 3, 2), 3, "F")
    cases.append(("forwards alone, 3 ranks", forwards, {"F": 1.0}, 0.5))

    def body(ctx):
        out = []
        for _, order, costs, message in cases:
            found = impl.replay(given(impl, order), costs, message=message)
            spans = [[(*step, start, end) for step, start, end in each] for each in found.spans]
            out.append([spans, float(found.seconds), float(found.bubble)])
        return out

    (results,) = run(body, 1, process_group=False, ledger=False)
    for (name, order, costs, message), got in zip(cases, results, strict=True):
        split = any(step[0] == "W" for steps in order for step in steps)
        costs = costs or (SPLIT if split else COSTS)
        ends = times(order, costs, message)
        what = f"{name}, costs {costs}, {message} per message"
        for rank, spans in enumerate(got[0]):
            compute = [step for step in order[rank] if len(step[0]) == 1]
            steps = [(k, s, i) for k, s, i, _, _ in spans]
            expect_equal(steps, compute, what=f"{what}: compute steps", rank=rank, cause="steps")
            for kind, s, i, start, end in spans:
                want = ends[kind, s, i]
                if abs(end - want) > 1e-9 or abs(start - want + costs[kind]) > 1e-9:
                    text = f"{what}: {kind}({s}, {i}) takes from {want - costs[kind]} to {want}"
                    fail(f"{text}, got {start} to {end}", cause="times", rank=rank)
        if abs(got[1] - max(ends.values())) > 1e-9:
            fail(f"{what}: takes {max(ends.values())}, got {got[1]}", cause="seconds")
        if abs(got[2] - bubble(order, costs, message)) > 1e-9:
            want = bubble(order, costs, message)
            fail(f"{what}: the idle share is {want:.4f}, got {got[2]:.4f}", cause="bubble")


@exercise("2.21", "gloo", asserts="peak untouched alone life")
def test_peak_counts_what_is_kept(impl, run, seed):
    """Kept from F to B, with W steps to W; messages don't count."""
    cases = [(name, completed(seed, order)) for name, _, _, order in orders(seed)]
    cases.append(("forwards alone", [[("F", 0, i) for i in range(3)]]))
    own = one_after_another(3, 3)
    own[1] = [step for i in range(3) for step in (*own[1][2 * i : 2 * i + 2], ("W", 1, i))]
    cases.append(("steps W on rank 1 only", own))

    def body(ctx):
        found = [impl.peak_live(given(impl, schedule)) for _, schedule in cases]
        return [[int(count) for count in each] for each in found]

    (results,) = run(body, 1, process_group=False, ledger=False)
    for (name, schedule), got in zip(cases, results, strict=True):
        expect_equal(got, peaks(schedule), what=f"{name}: peak of each rank", cause="peak")


@trace("2.9")
def trace_messages(impl):
    """All forwards first on 4 ranks with 4 micro-batches: every message that was added is sent."""

    def body(ctx):
        schedule = impl.with_messages(as_steps(impl, all_forwards_first(4, 4)))
        to = {"send F": 1, "recv F": -1, "send B": -1, "recv B": 1}
        tensor = torch.zeros(1024)
        dist.barrier()
        ctx.start_picture()
        for step in schedule[ctx.rank]:
            if step.kind in to:
                transfer = dist.send if step.kind.startswith("send") else dist.recv
                transfer(tensor, ctx.rank + to[step.kind])
                continue
            with ctx.span("forward" if step.kind == "F" else "backward", str(step.micro_batch)):
                time.sleep(0.02 if step.kind == "F" else 0.04)

    return body


@trace("2.21", bubble=3 / 7)
def trace_replay(impl):
    """All forwards first on 4 ranks with 4 micro-batches, as `replay` says it would go."""

    def body(ctx):
        spans = impl.replay(as_steps(impl, all_forwards_first(4, 4))).spans[ctx.rank]
        dist.barrier()
        begin = time.monotonic()
        ctx.start_picture()
        for step, start, end in spans:
            time.sleep(max(0.0, begin + start * 0.03 - time.monotonic()))
            with ctx.span("forward" if step.kind == "F" else "backward", str(step.micro_batch)):
                time.sleep((end - start) * 0.03)

    return body
