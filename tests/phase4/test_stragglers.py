"""Checks of exercise 4.11: reports of all ranks, and slow ranks found."""

from __future__ import annotations

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
COMMUNICATION = {"exposed_communication": 0.2, "hidden_communication": 0.1}  # of own time


def expect_near(got: float, want: float, what: str, cause: str, rank: int, **wrong: float) -> None:
    """Fail unless equal to rounding; ``wrong``: what known mistakes give, by their causes."""
    if abs(got - want) <= 1e-9 * abs(want):
        return
    for mistake, value in wrong.items():
        if abs(got - value) <= 1e-9 * abs(value):
            cause = mistake.replace("_", "-")
    fail(f"{what} on rank {rank}: expected {want:.6g}, got {got:.6g}", cause=cause, rank=rank)


# -- reports of all ranks --------------------------------------------------------------------------
@exercise("4.11", "virtual gloo cuda")
def test_report_is_of_all_ranks(impl, run, cases):
    """Loss, rates and times over all ranks and steps of a window, the same on every rank."""
    for world_size in cases(3, 1, 4):

        def body(ctx):
            r = ctx.rank
            amounts = {"samples": 2 + 3 * r, "tokens": 10 * (2 + 3 * r)}
            amounts |= {"exposed": 0.2 * (1 + r), "hidden": 0.1 * (1 + r)}
            window = [
                step_metrics(step, 1.0 + r, loss=float(r + step), memory=memory, **amounts)
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
                per_rank=samples[rank] / (1.0 + rank),
                added_rates=sum(n / (1.0 + r) for r, n in zip(ranks, samples, strict=True)),
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
                expect_near(got[f"own_seconds_rank{r}"], 1.0 + r, f"rank {r}'s own", "times", rank)
            where = (got["step"], got["steps"], got["ranks"])
            expect_equal(where, (5, 2, world_size), what="last step, steps and ranks", rank=rank)


@exercise("4.11", "virtual")
def test_ranks_without_samples(impl, run):
    """A rank that had no samples has no loss (NaN): it must not touch the others'."""

    def body(ctx):
        empty = {"loss": float("nan"), "samples": 0, "tokens": 0, "flops": 0.0}
        full = {"loss": 3.0 + ctx.rank, "samples": 8}
        window = [
            step_metrics(0, 1.0, **(empty if ctx.rank == 1 else full)),
            step_metrics(1, 1.0, **(empty if ctx.rank else full)),
        ]
        nobody = [step_metrics(2, 1.0, **empty)]
        return impl.aggregate(window).loss, impl.aggregate(nobody).loss

    for rank, (loss, none) in enumerate(run(body, 3)):
        expect_near(loss, (3.0 + 3.0 + 5.0) / 3, "the loss of three windows' parts", "loss", rank)
        expect_equal(none != none, True, what="the loss of no samples is NaN", rank=rank)


@exercise("4.11", "virtual gloo")
def test_one_small_message_per_report(impl, run):
    """One all-gather of some hundred bytes every k steps, nothing between."""

    def body(ctx):
        monitor = impl.ClusterMonitor(K, device=ctx.device)
        return [monitor.add(step_metrics(step, 1.0)) is not None for step in range(2 * K + 2)]

    results = run(body, 3)
    for rank, reports in enumerate(results):
        log = results.logs[rank]
        want = [(step + 1) % K == 0 and step < 2 * K for step in range(2 * K + 2)]
        expect_equal(reports, want, what=f"a report every {K} steps", rank=rank, cause="when")
        if len(log.events) > 2:
            fail(
                f"rank {rank} issued {len(log.events)} collectives for two reports: one each is "
                "enough, and every further one costs all ranks its latency",
                cause="too-many-messages",
                rank=rank,
            )
        log.sent_at_most(2 * 2 * 30 * 8, "30 numbers to each of 2 ranks, twice")


@exercise("4.11", "virtual")
def test_reports_of_a_group(impl, run):
    """A group without rank 0: its ranks' numbers, by rank of the group."""

    def body(ctx):
        group = dist.new_group([1, 3])
        if ctx.rank not in (1, 3):
            return None
        monitor = impl.ClusterMonitor(1, group=group)
        report = monitor.add(step_metrics(0, 1.0 + ctx.rank, loss=float(ctx.rank)))
        return report.loss, [r.own for r in report.ranks]

    results = run(body, 4)
    for rank in (1, 3):
        expect_equal(results[rank], (2.0, [2.0, 4.0]), what="loss, own times", rank=rank)


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


@exercise("4.11", "virtual")
def test_which_rank_by_how_much_and_since_when(impl, run, cases):
    """All steps take equally long on all ranks, because they wait: still the slow rank is found."""
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


@exercise("4.11", "virtual")
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


@exercise("4.11", "virtual")
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


@exercise("4.11", "virtual")
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


@exercise("4.11", "virtual")
def test_bad_settings_are_refused(impl, run):
    """An empty window, windows of 0 steps, a tolerance below 1, no patience."""
    calls = [
        ("an empty window", lambda m: m.aggregate([]), [0]),
        ("reports on 0 steps", lambda m: m.ClusterMonitor(0), [0]),
        ("a tolerance of 0.5", lambda m: m.StragglerDetector(tolerance=0.5), [0.5]),
        ("a patience of 0", lambda m: m.StragglerDetector(patience=0), [0]),
        ("negative noise", lambda m: m.StragglerDetector(noise=-3.0), [-3.0]),
    ]
    wrong = [call for _, call, _ in calls]

    def body(ctx):
        return [refusal(call, impl) for call in wrong]

    expect_refused(run(body, 2), [(what, numbers) for what, _, numbers in calls])


@trace("4.11")
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
