"""Checks of exercise 4.11: reports of all ranks, and slow ranks found."""

from __future__ import annotations

import dataclasses
import random
import time

import torch
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase4.cluster_steps import step_metrics, synchronous_steps, usual_of

K = 5  # steps of a report
NAN = float("nan")
NOT_FINITE = (float("inf"), -float("inf"), NAN)
OWN_PHASE = {"backward": 0.6, "evaluation": 0.2}
COMMUNICATION = {"exposed_communication": 0.2, "hidden_communication": 0.1}  # of own time


def pace(rank: int, world_size: int) -> float:
    """The rank's seconds: all different, and the slowest rank is not the last one."""
    order = [*range(1, world_size + 1)]
    order[-2:] = reversed(order[-2:])
    return float(order[rank])


def expect_near(got: float, want: float, what: str, cause: str, rank: int, **wrong: float) -> None:
    """Fail unless equal to rounding; ``wrong``: the values of known mistakes, by their causes."""
    if not isinstance(got, (int, float)):
        fail(f"{what} on rank {rank}: expected {want!r}, got {got!r}", cause="type", rank=rank)
    if abs(got - want) <= 1e-9 * abs(want):
        return
    for mistake, value in wrong.items():
        if abs(got - value) <= 1e-9 * abs(value):
            cause = mistake.replace("_", "-")
    if abs(got - want) <= 1e-6 * abs(want):
        fail(
            f"{what} on rank {rank}: expected {want!r}, got {got!r}: right to 7 digits only, as "
            "float32 has them; float64 has all",
            cause="digits",
            rank=rank,
        )
    fail(f"{what} on rank {rank}: expected {want!r}, got {got!r}", cause=cause, rank=rank)


# -- reports of all ranks --------------------------------------------------------------------------
@exercise(
    "4.11", "virtual gloo cuda", nccl=True, asserts="all-ranks sums means rates largest-memory"
)
def test_report_is_of_all_ranks(impl, run, cases):
    """Loss, rates and times over all ranks and steps of a window, the same on every rank."""
    for world_size in cases(3, 1, 4):

        def body(ctx):
            r = ctx.rank
            amounts = {"samples": 2 + 3 * r, "tokens": 10 * (2 + 3 * r)}
            amounts |= {"exposed": 0.2 * (1 + r), "hidden": 0.1 * (1 + r)}
            window = [
                step_metrics(
                    step, pace(r, world_size), loss=float(r + step), memory=memory, **amounts
                )
                for step, memory in ((4, 15 + 10 * r), (5, 10))
            ]
            report = impl.aggregate(window, device=ctx.device)
            return report.as_dict() | {"step": report.step, "steps": report.steps}

        ranks = range(world_size)
        samples = [2 + 3 * r for r in ranks]
        total = sum(samples)
        for rank, got in reversed([*enumerate(run(body, world_size))]):
            expect_near(
                got["loss"],
                sum((r + 4.5) * n for r, n in zip(ranks, samples, strict=True)) / total,
                f"the mean loss of {total} samples per step",
                "loss",
                rank,
                local_loss=rank + 4.5,
                first_ranks_loss=4.5,
                mean_of_means=sum(r + 4.5 for r in ranks) / world_size,
            )
            slowest = float(world_size)
            expect_near(
                got["samples_per_second"],
                total / slowest,
                "samples per second of all ranks",
                "throughput",
                rank,
                per_rank=samples[rank] / pace(rank, world_size),
                added_rates=sum(samples[r] / pace(r, world_size) for r in ranks),
                w_times=world_size * total / slowest,
            )
            tokens = got["tokens_per_second"]
            expect_near(tokens, 10 * total / slowest, "tokens per second", "throughput", rank)
            mfu = 4e9 / slowest / 1e10
            expect_near(got["mfu"], mfu, "MFU of all ranks", "throughput", rank)
            expect_near(got["step_seconds"], slowest, "seconds of a step", "times", rank)
            mean = sum(1.0 + r for r in ranks) / world_size
            for name, share in (("forward", 0.3), *COMMUNICATION.items()):
                what = f"mean seconds of {name.replace('_', ' ')}"
                expect_near(got[f"{name}_seconds"], share * mean, what, "times", rank)
            most = (5 + 10 * world_size) / 100
            what = "share of the memory, of all ranks and steps the most"
            expect_near(got["memory_share"], most, what, "memory", rank)
            for r in ranks:
                own = pace(r, world_size)
                expect_near(got[f"own_seconds_rank{r}"], own, f"rank {r}'s own", "times", rank)
            where = (got["step"], got["steps"], got["ranks"])
            expect_equal(where, (5, 2, world_size), what="last step, steps and ranks", rank=rank)


@exercise("4.11", "virtual", asserts="no-samples alone")
def test_ranks_without_samples(impl, run):
    """A rank without samples has no loss (NaN), and this must not touch the mean. A loss of NaN
    from real samples does: nothing may hide it."""

    def body(ctx):
        nothing = [1e30, float("inf"), float("nan")][ctx.rank]
        empty = {"loss": nothing, "samples": 0, "tokens": 0, "flops": 0.0}
        full = {"loss": 3.0 + ctx.rank, "samples": 8}
        window = [
            step_metrics(0, 1.0, **(empty if ctx.rank == 1 else full)),
            step_metrics(1, 1.0, **(empty if ctx.rank else full)),
        ]
        nobody = [step_metrics(2, 1.0, **empty)]
        lost = step_metrics(2, 1.0, loss=float("nan") if ctx.rank == 1 else 2.0)
        return [impl.aggregate(steps).loss for steps in (window, nobody, [lost])]

    for rank, (loss, none, lost) in enumerate(run(body, 3)):
        if lost == lost:
            fail(
                f"rank 1 has 4 samples with a loss of NaN, and rank {rank} reports {lost}: "
                "a run that diverges must show it",
                cause="nan-hidden",
                rank=rank,
            )
        expect_near(loss, (3.0 + 3.0 + 5.0) / 3, "the loss of three windows' parts", "loss", rank)
        expect_equal(none != none, True, what="the loss of no samples is NaN", rank=rank)


@exercise("4.11", "virtual", asserts="sums means median phases largest-memory dtype no-samples")
def test_a_rank_sums_up_its_window(impl, run):
    """Sums, means, the median of own times, the largest share of the memory; phases may be missing;
    numbers above 2^53 and of any size arrive to the bit."""
    windows = {
        "three steps": [
            step_metrics(0, 1.0, 0.3, samples=2**40, loss=2.0, phases={"data": 0.3}),
            step_metrics(1, 9.0, 0.6, samples=0, loss=float("nan"), phases={}),
            step_metrics(2, 2.0, 0.9, samples=2**41, loss=5.0, memory=70, phases=OWN_PHASE),
        ],
        "memories of two sizes": [
            step_metrics(s, 1.0, memory=m, memory_capacity=c)
            for s, (m, c) in enumerate([(30, 40), (60, 100)])
        ],
        "four steps": [step_metrics(s, own, 0.5 * s) for s, own in enumerate([4.0, 1.0, 2.0, 9.0])],
        "no samples": [step_metrics(0, 1.0, samples=0, loss=3.0)],
        "infinite losses of no samples": [
            step_metrics(0, 1.0, loss=2.0),
            *(step_metrics(s, 1.0, samples=0, loss=bad) for s, bad in enumerate(NOT_FINITE, 1)),
        ],
        "a NaN of four samples": [step_metrics(s, 1.0, loss=x) for s, x in enumerate([2.0, NAN])],
        "an infinity of four": [step_metrics(s, 1.0, loss=x) for s, x in enumerate([2.0, -1e999])],
    }

    def body(ctx):
        mine = [impl.summarise(window) for window in windows.values()]
        odd = dataclasses.replace(mine[0], samples=2.0**53 - 1, tokens=0.1, flops=1e300, loss=-0.0)
        return [vars(m) for m in mine], vars(odd), [vars(m) for m in impl.metrics_of_all(odd)]

    for rank, (found, odd, everybody) in enumerate(run(body, 2)):
        for (what, window), got in zip(windows.items(), found, strict=True):
            for name, want in summed_up(window).items():
                where = f"{name} of {what}"
                if want != want:
                    expect_equal(got[name] != got[name], True, what=f"{where} is NaN", rank=rank)
                elif want in NOT_FINITE:
                    expect_equal(got[name], want, what=where, rank=rank, cause="loss")
                elif name == "phases":
                    expect_equal(len(got[name]), 4, what="phases", rank=rank)
                    for phase, (a, b) in enumerate(zip(got[name], want, strict=True)):
                        expect_near(a, b, f"{where}, number {phase}", "times", rank)
                else:
                    expect_near(got[name], want, where, name, rank)
        for other in everybody:
            expect_equal(other, odd, what="what the ranks have told", rank=rank, cause="digits")


def summed_up(window: list) -> dict:
    """A rank's report on its window, by name."""
    mean = lambda values: sum(values) / len(window)
    owns = sorted(m.seconds - m.exposed for m in window)
    samples = sum(m.samples for m in window)
    losses = sum(m.loss * m.samples for m in window if m.samples)
    names = ("data", "forward", "backward", "optimizer")
    return {
        "samples": samples,
        "tokens": sum(m.tokens for m in window),
        "flops": sum(m.flops for m in window),
        "seconds": sum(m.seconds for m in window),
        "loss": losses / samples if samples else float("nan"),
        "own": (owns[(len(owns) - 1) // 2] + owns[len(owns) // 2]) / 2,
        "exposed": mean([m.exposed for m in window]),
        "hidden": mean([m.hidden for m in window]),
        "memory_share": max(m.memory / m.memory_capacity for m in window),
        "phases": tuple(mean([m.phases.get(n, 0.0) for m in window]) for n in names),
    }


@exercise("4.11", "virtual", asserts="slow-rule medians thresholds factor")
def test_thresholds_are_as_promised(impl, run):
    """More than tolerance times the others' median, and further than noise deviations: not equal.

    The lower of two in the middle, MAD of the others only, times of any size.
    """
    cases = {  # own times; tolerance and noise; the slow ranks
        "exactly tolerance times the median": ([1.0, 1.0, 1.5], (1.5, 0.0), []),
        "a little more": ([1.0, 1.0, 1.51], (1.5, 0.0), [2]),
        "milliseconds": ([0.001, 0.001, 0.00151], (1.5, 0.0), [2]),
        "milliseconds, not slow": ([0.001, 0.001, 0.00149], (1.5, 0.0), []),
        "minutes": ([100.0, 100.0, 151.0], (1.5, 0.0), [2]),
        "minutes, not slow": ([100.0, 100.0, 149.0], (1.5, 0.0), []),
        "no noise between the others": ([1.0, 1.0, 1.0, 1.3], (1.2, 100.0), [3]),
        "less than the noise explains": ([1.0, 1.25, 1.5, 2.0], (1.2, 2.05), []),
        "more than the noise explains": ([1.0, 1.25, 1.5, 2.0], (1.2, 1.9), [3]),
        "rank 1 of them": ([1.0, 2.0, 1.25, 1.5], (1.2, 1.9), [1]),
        "the lower middle of four": ([1.0, 1.0, 1.3, 1.3, 1.3], (1.25, 0.0), [2, 3, 4]),
        "tolerance 1, noise 0": ([1.0, 1.0, 1.0], (1.0, 0.0), []),
    }

    def body(ctx):
        found = {}
        for what, (owns, (tolerance, noise), _) in cases.items():
            if len(owns) == ctx.world_size:
                detector = impl.StragglerDetector(tolerance=tolerance, noise=noise, patience=1)
                monitor = impl.ClusterMonitor(1, detector=detector)
                report = monitor.add(step_metrics(3, owns[ctx.rank]))
                found[what] = [(s.rank, s.factor, s.since) for s in report.stragglers]
        return found

    found = {what: got for size in (3, 4, 5) for what, got in run(body, size)[0].items()}
    for what, (owns, limits, want) in cases.items():
        got = found[what]
        ranks = sorted(rank for rank, *_ in got)
        where = f"{what}: own times {owns}, tolerance and noise {limits}: slow ranks"
        cause = "missed" if set(want) - set(ranks) else "false-alarm"
        expect_equal(ranks, want, what=where, cause=cause)
        for rank, factor, since in got:
            right = owns[rank] / usual_of(owns, rank)
            expect_near(factor, right, f"{what}: factor of rank {rank}", "how-much", 0)
            expect_equal(since, 3, what=f"{what}: since", cause="since")


@exercise("4.11", "virtual", asserts="patience life resources")
def test_detectors_and_monitors_know_nothing_of_each_other(impl, run):
    """Two detectors and two monitors at once; a monitor keeps no step of an earlier report."""

    def body(ctx):
        first, second = (impl.ClusterMonitor(2) for _ in range(2))
        found = []
        for step in range(1, 7):  # a resumed run: windows begin anywhere
            slow = step_metrics(step, 1.0 + (ctx.rank == 1), 1.0 - (ctx.rank == 1))
            report = first.add(slow)
            quiet = second.add(step_metrics(step, 1.0)) if step < 5 else None
            reports = [each for each in (report, quiet) if each is not None]
            found += [(r.step, r.steps, [(s.rank, s.since) for s in r.stragglers]) for r in reports]
        return found

    want = [(2, 2, []), (2, 2, []), (4, 2, [(1, 1)]), (4, 2, []), (6, 2, [(1, 1)])]
    for rank, got in enumerate(run(body, 3)):
        what = "of two monitors' reports the last steps, their numbers, and slow ranks with since"
        expect_equal(got, want, what=what, rank=rank, cause="shared-state")


@exercise("4.11", "virtual gloo", asserts="one-all-gather window silent cost")
def test_one_small_message_per_report(impl, run):
    """One all-gather of some hundred bytes every k steps, and no message between."""

    def body(ctx):
        monitor = impl.ClusterMonitor(K, device=ctx.device)
        steps = range(2 * K + 2)  # the first one is step 3, as in a run that was resumed
        return [monitor.add(step_metrics(3 + step, 1.0)) is not None for step in steps]

    results = run(body, 3)
    for rank, reports in enumerate(results):
        log = results.logs[rank]
        want = [(step + 1) % K == 0 and step < 2 * K for step in range(2 * K + 2)]
        what = f"a report every {K} steps, of a run that begins with step 3"
        expect_equal(reports, want, what=what, rank=rank, cause="when")
        if len(log.events) > 2:
            fail(
                f"rank {rank} issued {len(log.events)} collectives for two reports: one each is "
                "enough, and every further one costs all ranks its latency",
                cause="too-many-messages",
                rank=rank,
            )
        log.sent_at_most(2 * 2 * 30 * 8, "30 numbers to each of 2 ranks, twice")


@exercise("4.11", "virtual", asserts="by-rank-of-the-group group")
def test_reports_of_a_group(impl, run):
    """Ranks 3, 1 and 2, 0 report among themselves, by rank of the group; one group more often."""

    def body(ctx):
        groups = [dist.new_group(ranks) for ranks in ([3, 1], [2, 0])]
        mine = groups[0] if ctx.rank in (1, 3) else groups[1]
        detector = impl.StragglerDetector(patience=1)
        monitor = impl.ClusterMonitor(1, group=mine, detector=detector)
        for step in range(1 + ctx.rank % 2):
            report = monitor.add(step_metrics(step, 1.0 + ctx.rank, loss=float(ctx.rank)))
        return report.loss, [r.own for r in report.ranks], [s.rank for s in report.stragglers]

    want = {0: (1.0, [1.0, 3.0], [1]), 1: (2.0, [2.0, 4.0], [1])}
    for rank, got in enumerate(run(body, 4)):
        what = "loss, own times and slow ranks of the group"
        expect_equal(got, want[rank % 2], what=what, rank=rank, cause="group")


# -- stragglers ------------------------------------------------------------------------------------
def watch(impl, own_times, options=None):
    """A body that reports on ``own_times[report][rank]``; what it found after each report."""

    def body(ctx):
        detector = impl.StragglerDetector(**(options or {}))
        monitor = impl.ClusterMonitor(K, detector=detector)
        found = []
        for number, owns in enumerate(own_times):
            for step in range(number * K, (number + 1) * K):
                report = monitor.add(synchronous_steps(step, owns)[ctx.rank])
            found.append([(s.rank, s.factor, s.seconds, s.since) for s in report.stragglers])
        return found

    return body


def expect_found(results, own_times, want, what):
    """``want``: for each report {rank: since}; factors and seconds follow from ``own_times``."""
    for rank, found in enumerate(results):
        for number, (stragglers, expected) in enumerate(zip(found, want, strict=True)):
            where = f"{what}, report {number} (up to step {(number + 1) * K - 1})"
            owns = own_times[number]
            ranks = [s[0] for s in stragglers]
            if missed := set(expected) - set(ranks):
                fail(f"{where}: missed rank {missed.pop()}", cause="missed", rank=rank)
            if false := set(ranks) - set(expected):
                fail(f"{where}: rank {false.pop()} is not slow", cause="false-alarm", rank=rank)
            worst_first = sorted(expected, key=lambda r: -owns[r])
            expect_equal(ranks, worst_first, what=f"{where}: the slowest first", rank=rank)
            for slow, factor, seconds, since in stragglers:
                usual = usual_of(owns, slow)
                expect_near(factor, owns[slow] / usual, f"{where}: factor", "how-much", rank)
                lost = owns[slow] - usual
                expect_near(seconds, lost, f"{where}: seconds lost per step", "how-much", rank)
                expect_equal(
                    since, expected[slow], what=f"{where}: since", rank=rank, cause="since"
                )


EVEN = [1.0, 1.02, 0.99, 1.01]


@exercise("4.11", "virtual", asserts="slow-rule patience since factor slowest-first never-alone")
def test_which_rank_by_how_much_and_since_when(impl, run, cases):
    """All steps take equally long on all ranks, because ranks wait: still
    the slow rank is found."""
    late = [*EVEN[:2], 1.8, EVEN[3]]
    two = [1.0, 1.5]
    scenes = {
        "rank 2 of 4 from step 10 on": (
            [EVEN, EVEN, late, late, late],
            [{}, {}, {}, {2: 10}, {2: 10}],
        ),
        "one of two ranks": ([two, two], [{}, {1: 0}]),
        "a node of two ranks": ([[2.0, 1.0, 1.1, 2.2]] * 2, [{}, {0: 0, 3: 0}]),
        "recovered, and again": (
            [late, late, EVEN, late, late, EVEN],
            [{}, {2: 0}, {}, {}, {2: 15}, {}],
        ),
        "alone": ([[3.0]] * 2, [{}, {}]),
        "a patience of 3 reports": (
            [late, late, EVEN, *[late] * 4],
            [{}, {}, {}, {}, {}, {2: 15}, {2: 15}],
        ),
    }
    for what in cases(*scenes):
        own_times, want = scenes[what]
        options = {"patience": 3} if "patience" in what else {}
        results = run(watch(impl, own_times, options), len(own_times[0]))
        expect_found(results, own_times, want, what)


@exercise("4.11", "virtual", asserts="slow-rule")
def test_no_false_alarm(impl, run, seed):
    """Noise, one slow report, all ranks slower at once, and ranks that always differ."""
    draw = random.Random(seed)
    noise = lambda w: [1.0 + draw.gauss(0, 0.03) for _ in range(w)]
    scenes = {
        "noise of 3 % on four ranks": [noise(4) for _ in range(30)],
        "noise of 3 % on two ranks": [noise(2) for _ in range(30)],
        "one slow report": [EVEN, [1.0, 3.0, 1.0, 1.0], EVEN, EVEN],
        "everything slower": [EVEN, EVEN, *[[2.0 * own for own in EVEN]] * 3],
        "uneven by nature": [[0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.35]] * 3,
    }
    for what, own_times in scenes.items():
        results = run(watch(impl, own_times), len(own_times[0]))
        expect_found(results, own_times, [{}] * len(own_times), what)


@exercise("4.11", "virtual", asserts="median")
def test_one_slow_step_is_no_slow_rank(impl, run):
    """A checkpoint or a garbage collection in each window: one step of five is long on rank 1."""

    def body(ctx):
        monitor = impl.ClusterMonitor(K)
        for step in range(3 * K):
            owns = [1.0, 5.0 if step % K == 2 else 1.0, 1.0]
            report = monitor.add(synchronous_steps(step, owns)[ctx.rank])
        return [str(s) for s in report.stragglers]

    for rank, found in enumerate(run(body, 3)):
        what = "one slow step per window: stragglers"
        expect_equal(found, [], what=what, rank=rank, cause="false-alarm")


@exercise("4.11", "virtual", asserts="phase slow-rule")
def test_where_a_straggler_loses_its_time(impl, run):
    """The phase in which it exceeds the others, not its longest one; and settings are obeyed."""

    def body(ctx):
        found = []
        for options in ({"patience": 1}, {"patience": 1, "tolerance": 2.0}):
            monitor = impl.ClusterMonitor(1, detector=impl.StragglerDetector(**options))
            slow = 0.3 * (ctx.rank == 1)
            phases = {"data": 0.1 + slow, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
            metrics = step_metrics(0, 1.0 + slow, 0.3 - slow, phases=phases)
            found.append([(s.rank, s.phase) for s in monitor.add(metrics).stragglers])
        return found

    for rank, (found, tolerated) in enumerate(run(body, 3)):
        expect_equal(found, [(1, "data")], what="rank and phase", rank=rank, cause="phase")
        expect_equal(tolerated, [], what="1.3 times, tolerance 2", rank=rank, cause="false-alarm")


@exercise("4.11", "virtual", asserts="refused refusals")
def test_bad_settings_are_refused(impl, run):
    """An empty window, windows of 0 steps, a tolerance below 1, no patience."""
    calls = {
        "an empty window": lambda m: m.aggregate([]),
        "reports on 0 steps": lambda m: m.ClusterMonitor(0),
        "a tolerance of 0.5": lambda m: m.StragglerDetector(tolerance=0.5),
        "a patience of 0": lambda m: m.StragglerDetector(patience=0),
        "negative noise": lambda m: m.StragglerDetector(noise=-3.0),
    }
    wrong = [*calls.values()]

    def body(ctx):
        return [refusal(call, impl) for call in wrong]

    expect_refused(run(body, 2), [*calls])


@trace("4.11", measures="waiting")
def scenario(impl):
    """Rank 1 computes twice as long: the others wait in the all-reduce, and the report says so."""

    def body(ctx):
        monitor = impl.ClusterMonitor(2, detector=impl.StragglerDetector(patience=1))
        ctx.start_picture()
        for step in range(4):
            own = 0.02 if ctx.rank == 1 else 0.01
            with ctx.span("compute"):
                time.sleep(own)
            begun = time.perf_counter()
            dist.all_reduce(torch.zeros(1000, device=ctx.device))
            monitor.add(step_metrics(step, own, time.perf_counter() - begun))

    return body
