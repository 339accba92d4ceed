"""Checks of exercise 2.26: zero bubble with several stages per rank, in turn or in a V."""

from __future__ import annotations

from itertools import pairwise

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from tests.phase2.pipeline_orders import Plain, Steps, placement, plain, times
from tests.phase2.pipeline_runs import (
    UNIT,
    check_bubble,
    check_executed,
    check_order,
    check_peaks,
    check_run,
    paced_scenario,
)

SPLIT = {"F": 1.0, "B": 1.0, "W": 1.0}
PIPELINE = "zero_bubble.ZeroBubblePipeline"
TURNS = [(1, 2, 2), (2, 2, 3), (2, 4, 2), (3, 3, 1), (3, 6, 2), (4, 8, 2), (5, 5, 2), (4, 4, 3)]
VS = [(p, m) for p in (1, 2, 3, 4) for m in range(1, 2 * p + 2)] + [(4, 8), (6, 7), (5, 16)]
PAIRED = [(1, 2), (1, 3), (2, 4), (2, 7), (3, 6), (4, 8), (4, 9), (5, 11), (6, 12)]


# -- plans ----------------------------------------------------------------------------------------
@exercise("2.26", "gloo", asserts="names counted queue rest life")
def test_a_plan_is_written_out(impl, run):
    """Micro-batches are counted for each name, "W" is the oldest W, and the rest follows."""
    plans: dict[str, tuple[list[str], list[Plain]]] = {
        "F0 F2 F0 B2 F2 B0 W B0": (
            ["F0", "F2", "F0", "B2", "F2", "B0", "W", "B0"],
            [
                *[("F", 7, 0), ("F", 3, 0), ("F", 7, 1), ("B", 3, 0), ("F", 3, 1), ("B", 7, 0)],
                *[("W", 3, 0), ("B", 7, 1), ("W", 7, 0), ("W", 7, 1)],
            ],
        ),
        "F0 F1 F0 F2 B0 B1 W B0 B2": (  # the oldest W are neither those of the smallest stages
            ["F0", "F1", "F0", "F2", "B0", "B1", "W", "B0", "B2"],  # nor of the first micro-batches
            [
                *[("F", 7, 0), ("F", 5, 0), ("F", 7, 1), ("F", 3, 0), ("B", 7, 0), ("B", 5, 0)],
                *[("W", 7, 0), ("B", 7, 1), ("B", 3, 0), ("W", 5, 0), ("W", 7, 1), ("W", 3, 0)],
            ],
        ),
        "F10 B10 W": (["F10", "B10", "W"], [("F", 10, 0), ("B", 10, 0), ("W", 10, 0)]),
        "nothing": ([], []),
    }
    stages = {"F10 B10 W": range(11)}

    def body(ctx):
        fields = ("kind", "stage", "micro_batch")  # files by another name have a Step of their own
        found = []
        for name, (plan, _) in plans.items():
            for given in (plan, tuple(plan), iter(plan)):
                made = impl.written_out(given, stages.get(name, (7, 5, 3)))
                steps = all(getattr(s, "_fields", ()) == fields for s in made)
                found.append((plain([made])[0], steps))
        return found

    found = run(body, 1, process_group=False, ledger=False)[0]
    wanted = [(name, want) for name, (_, want) in plans.items() for _ in range(3)]
    for (got, steps), (name, want) in zip(found, wanted, strict=True):
        expect_equal(got, want, what=f"the plan {name}, written out", cause="plan")
        expect_equal(steps, True, what=f"the plan {name}: whether all are a Step", cause="type")


# -- orders ---------------------------------------------------------------------------------------
def orders_of(run, impl, name: str, sizes) -> list[tuple[Steps, Steps]]:
    """Each order by the exercise's function, and the same with messages."""

    def body(ctx):
        complete = impl.module("pipeline_schedules").with_messages
        made = [getattr(impl, name)(*size) for size in sizes]
        return [[plain(order), plain(complete(order))] for order in made]

    return run(body, 1, process_group=False, ledger=False)[0]


def check_made(order: Steps, schedule: Steps, rank_of: list[int], m: int, what: str) -> None:
    """Complete with F, B and W, and every stage on its rank."""
    check_order(order, schedule, len(rank_of), m, what)
    for rank, steps in enumerate(order):
        stages = sorted({stage for _, stage, _ in steps})
        want = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        expect_equal(stages, want, what=f"{what}: stages", rank=rank, cause="placement")
        kinds = {kind for kind, _, _ in steps}
        expect_equal(kinds, {"F", "B", "W"}, what=f"{what}: steps", rank=rank, cause="not-split")


def check_messages(schedule: Steps, want: int, what: str) -> None:
    """No more and no fewer messages than the boundaries between ranks need."""
    got = sum(kind.startswith("send") for steps in schedule for kind, _, _ in steps)
    expect_equal(got, want, what=f"{what}: messages of all ranks", cause="messages")


@exercise("2.26", "gloo", asserts="turns short kept resources cost")
def test_interleaved_zero_bubble_is_short(impl, run):
    """Stages r, r+p, …; a step takes 3vm + p-1, and no rank keeps more than v·p."""
    found = orders_of(run, impl, "interleaved_zero_bubble", TURNS)
    for (p, m, v), (order, schedule) in zip(TURNS, found, strict=True):
        what = f"{p} ranks, {m} micro-batches, {v} chunks per rank"
        check_made(order, schedule, placement("round", p, v), m, what)
        check_bubble(order, [SPLIT], (p - 1) / (3 * v * m + p - 1), what)
        check_peaks(order, [v * p] * p, what)
        check_messages(schedule, 2 * m * (v * p - 1) if p > 1 else 0, what)


@exercise("2.26", "gloo", asserts="v short kept resources cost")
def test_zb_v_is_short(impl, run):
    """Stages r and 2p-1-r; a step takes 6m + p-1 or 4(m+p) - 2, and min(2m, 2p) are kept."""
    found = orders_of(run, impl, "zero_bubble_v", VS)
    for (p, m), (order, schedule) in zip(VS, found, strict=True):
        what = f"ZB-V with {p} ranks and {m} micro-batches"
        check_made(order, schedule, placement("v", p, 2), m, what)
        check_bubble(order, [SPLIT], 1 - 6 * m / max(6 * m + p - 1, 4 * (m + p) - 2), what)
        check_peaks(order, [min(2 * m, 2 * p)] * p, what)
        check_messages(schedule, 4 * m * (p - 1), what)


@exercise("2.26", "gloo", asserts="never-waits")
def test_a_rank_of_zb_v_never_waits_once_it_has_begun(impl, run):
    """With m >= 2p-1 each step starts when the one before it on its rank has ended."""
    sizes = [(p, m) for p, m in VS if m >= 2 * p - 1]
    for (p, m), (order, _) in zip(sizes, orders_of(run, impl, "zero_bubble_v", sizes), strict=True):
        ends = times(order, SPLIT)
        for rank, steps in enumerate(order):
            for before, step in pairwise(steps):
                idle = ends[step] - SPLIT[step[0]] - ends[before]
                if idle > 1e-9:
                    text = f"ZB-V with {p} ranks and {m} micro-batches: before {step} the rank "
                    fail(f"{text}waits {idle:g} times a forward", cause="waits", rank=rank)


def pairs(steps: list[Plain]) -> int:
    """Forwards with the B and W of another micro-batch, of the other stage, right behind them."""
    found = 0
    for (f, stage, i), second, third in zip(steps, steps[1:], steps[2:], strict=False):
        b, other, j = second
        follow = f == "F" and b == "B" and third == ("W", other, j)
        found += follow and other != stage and i != j
    return found


@exercise("2.26", "gloo", asserts="v pairs short kept resources cost")
def test_dual_pipe_v_pairs_forwards_with_backwards(impl, run):
    """Rank r has 2m - 3p + r + 1 pairs; a step takes 6m + p-1, and 2p + 1 are kept."""
    found = orders_of(run, impl, "dual_pipe_v", PAIRED)
    for (p, m), (order, schedule) in zip(PAIRED, found, strict=True):
        what = f"DualPipe-V with {p} ranks and {m} micro-batches"
        check_made(order, schedule, placement("v", p, 2), m, what)
        for rank, steps in enumerate(order):
            got, want = pairs(steps), 2 * m - 3 * p + rank + 1
            if got < want:
                text = f"{what}: {got} forwards have another micro-batch's B and W of the other "
                fail(f"{text}stage behind them, expected {want}", cause="pairs", rank=rank)
        check_bubble(order, [SPLIT], (p - 1) / (6 * m + p - 1), what)
        check_peaks(order, [2 * p + 1] * p, what)
        check_messages(schedule, 4 * m * (p - 1), what)


@exercise("2.26", "gloo", asserts="numbers nobody-waits refusals")
def test_bad_numbers_and_plans_are_refused(impl, run):
    """A number below 1, m no multiple of p, m below 2p, a W that does not wait: ValueError."""
    calls = [
        *[("zero_bubble_v", (0, 2)), ("zero_bubble_v", (2, 0)), ("zero_bubble_v", (-1, 2))],
        *[("dual_pipe_v", (0, 4)), ("dual_pipe_v", (-1, 2)), ("dual_pipe_v", (1, 0))],
        *[("dual_pipe_v", (2, 3)), ("dual_pipe_v", (4, 7)), ("dual_pipe_v", (1, 1))],
        *[("interleaved_zero_bubble", size) for size in ((2, 0, 2), (0, 2, 2), (2, 2, 0))],
        *[("interleaved_zero_bubble", size) for size in ((4, 6, 2), (2, -2, 1), (3, 2, 2))],
        *[("written_out", (plan, (0, 1))) for plan in (["W"], ["F0", "B0", "W", "W", "F0"])],
    ]

    def body(ctx):
        return [refusal(getattr(impl, name), *arguments) for name, arguments in calls]

    (refused,) = run(body, 1, process_group=False, ledger=False)
    expect_refusals(refused, [f"{name}{arguments}" for name, arguments in calls])


# -- run ------------------------------------------------------------------------------------------
def maker(name: str, *sizes: int):
    """From the implementation to the schedule with messages."""

    def make(impl):
        return impl.module("pipeline_schedules").with_messages(getattr(impl, name)(*sizes))

    return make


@exercise("2.26", "virtual gloo cuda", asserts="turns v parameters layout life")
def test_schedules_equal_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss on all ranks, run by exercise 2.13's pipeline."""
    for name, p, m, v, kind in cases(
        ("zero_bubble_v", 2, 4, 2, "v"),
        ("interleaved_zero_bubble", 2, 2, 3, "round"),
        ("dual_pipe_v", 2, 4, 2, "v"),
        ("zero_bubble_v", 3, 2, 2, "v"),
        ("zero_bubble_v", 1, 2, 2, "v"),
        ("interleaved_zero_bubble", 3, 3, 2, "round"),
    ):
        sizes = (p, m, v) if kind == "round" else (p, m)
        make, frozen = maker(name, *sizes), m == 2
        more = {"chunks": v, "kind": kind, "frozen": frozen, "pipeline": PIPELINE}
        check_run(run, impl, seed, p, m, make, steps=2, **more)


@exercise("2.26", "virtual", asserts="short kept cost")
def test_schedules_take_the_time_of_theory(impl, run):
    """Run under a virtual clock with up to 8 ranks: 6m + p-1 halves of a forward, 2p kept."""
    for name, p, m, kept in (
        ("zero_bubble_v", 4, 8, 8),
        ("zero_bubble_v", 8, 15, 16),
        ("dual_pipe_v", 4, 8, 9),
        ("interleaved_zero_bubble", 4, 8, 8),
    ):
        sizes = (p, m, 2) if name == "interleaved_zero_bubble" else (p, m)
        seconds = (6 * m + p - 1) * UNIT / 2
        check_executed(run, impl, maker(name, *sizes), p, m, 2, seconds, [kept] * p, PIPELINE)


@trace("2.26", bubble=3 / 51)
def trace_zero_bubble_v(impl):
    """ZB-V with 8 micro-batches and the stages r and 7-r on rank r."""
    make = maker("zero_bubble_v", 4, 8)
    return paced_scenario(make, chunks=2, parts=(1, 1, 1), kind=PIPELINE, shape="v")(impl)
