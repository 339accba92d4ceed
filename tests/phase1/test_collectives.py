"""Checks of exercise 1.9: measuring communication. No absolute time is asserted."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace

QUEUE = 0.02  # seconds of work that the stand-in device has queued
OUTLIER = 0.2


@exercise("1.9", "virtual")
def test_queued_work_is_counted(impl, run):
    """Work still queued on the device when the call returns is part of its time."""

    def body(ctx):
        state = {"queued": 0.0}

        def fn():  # like a CUDA kernel: returns at once, the device works on
            state["queued"] += QUEUE

        def sync(device):
            time.sleep(state["queued"])
            state["queued"] = 0.0

        fn()  # left over from before: must not be counted
        return impl.time_collective(fn, warmup=0, repeats=3, sync=sync)

    for rank, seconds in enumerate(run(body, 2)):
        if seconds < QUEUE * 0.9:
            fail(
                f"the call takes {QUEUE} s on the device, but {seconds:.6f} s were measured: "
                "the clock stops before the device has finished",
                cause="not-synchronised",
                rank=rank,
            )


@exercise("1.9", "virtual")
def test_work_of_before_is_not_counted(impl, run):
    """What was queued before the timed call, warm-up included, is not part of its time."""

    def body(ctx):
        state = {"queued": 10 * QUEUE, "calls": 0}

        def fn():
            state["calls"] += 1
            if state["calls"] <= 1:  # the warm-up leaves work on the device
                state["queued"] += 10 * QUEUE

        def sync(device):
            time.sleep(state["queued"])
            state["queued"] = 0.0

        return impl.time_collective(fn, warmup=1, repeats=1, sync=sync)

    for rank, seconds in enumerate(run(body, 2)):
        if seconds > 5 * QUEUE:
            fail(
                f"{seconds:.3f} s were measured for a call that does nothing: the device still had "
                "work of before when the clock started",
                cause="not-synchronised-before",
                rank=rank,
            )


@exercise("1.9", "virtual")
def test_warmup_repeats_and_median(impl, run):
    """Warm-up calls are not timed, every repeat is, and one disturbed repeat does not matter."""

    def body(ctx):
        calls = []

        def fn():
            calls.append(time.perf_counter())
            if len(calls) in (1, 2, 5):  # both warm-up calls and the third of 5 repeats
                time.sleep(OUTLIER)

        seconds = impl.time_collective(fn, warmup=2, repeats=5)
        return len(calls), seconds

    for rank, (calls, seconds) in enumerate(run(body, 2)):
        expect_equal(
            calls, 7, what="calls for warmup=2, repeats=5", rank=rank, cause="wrong-number-of-calls"
        )
        if seconds > OUTLIER / 5:
            fail(
                f"{seconds:.3f} s reported, but 4 of 5 repeats take no time: warm-up calls are "
                "timed, or the mean is taken instead of the median",
                cause="not-the-median",
                rank=rank,
            )


@exercise("1.9", "virtual")
def test_slowest_rank_counts_everywhere(impl, run):
    """The time is that of the slowest rank, and every rank reports the same."""

    def body(ctx):
        def fn():
            time.sleep(QUEUE if ctx.rank == 1 else 0.0)

        return impl.time_collective(fn, warmup=0, repeats=3)

    results = run(body, 3)
    for rank, seconds in enumerate(results):
        if seconds < QUEUE * 0.9:
            fail(
                f"rank 1 takes {QUEUE} s, but rank {rank} reports {seconds:.6f} s: "
                "its own time, not that of the slowest rank",
                cause="own-time",
                rank=rank,
            )
        expect_equal(seconds, results[0], what="reported time", rank=rank, cause="own-time")


@exercise("1.9", "virtual")
def test_ranks_start_together(impl, run):
    """A rank that comes late does not make the others' call look slow."""

    def body(ctx):
        if ctx.rank == 1:
            time.sleep(5 * QUEUE)
        return impl.time_collective(dist.barrier, warmup=0, repeats=1)

    for rank, seconds in enumerate(run(body, 2)):
        if seconds > 3 * QUEUE:
            fail(
                f"{seconds:.3f} s for a barrier: waiting for a late rank was counted; "
                "let all ranks meet before the clock starts",
                cause="no-barrier",
                rank=rank,
            )


@exercise("1.9")
def test_bandwidth_formulas(impl, run):
    """Algorithm bandwidth N/t, bus bandwidth 2(W-1)/W of it."""

    def body(ctx):
        return [list(impl.bandwidth(8_000_000, 0.5, w)) for w in (1, 2, 4, 8)]

    got = run(body, 1, process_group=False)[0]
    for w, (algorithm, bus) in zip((1, 2, 4, 8), got, strict=True):
        want = (16e6, 16e6 * 2 * (w - 1) / w)
        if abs(algorithm - want[0]) > 1 or abs(bus - want[1]) > 1:
            cause = "per-rank-as-total" if algorithm > 1.5 * want[0] else "formula"
            fail(
                f"8 MB in 0.5 s on {w} ranks: expected algorithm and bus bandwidth {want}, "
                f"got {(algorithm, bus)} bytes per second",
                cause=cause,
            )


@exercise("1.9", "virtual")
def test_share_of_a_step(impl, run):
    """The share of a step spent communicating, between 0 and 1."""

    def body(ctx):
        slow = lambda: time.sleep(8 * QUEUE)
        fast = lambda: time.sleep(2 * QUEUE)
        options = {"warmup": 0, "repeats": 1}
        return [
            impl.communication_share(slow, fast, **options),
            impl.communication_share(fast, slow, **options),
        ]

    for rank, (share, negative) in enumerate(run(body, 2)):
        if not 0.6 < share < 0.9:
            fail(
                f"a step of {8 * QUEUE} s that takes {2 * QUEUE} s without communication: "
                f"expected a share near 0.75, got {share:.3f}",
                cause="share",
                rank=rank,
            )
        expect_equal(negative, 0.0, what="the share when noise makes it negative", rank=rank)


@exercise("1.9")
def test_comparison_and_plot(impl, run, tmp_path):
    """A row per strategy and size, the backend's own for comparison, and a picture of them."""
    picture = tmp_path / "costs.png"
    sizes = [4, 4_000]

    def body(ctx):
        rows = impl.compare_strategies(sizes, warmup=1, repeats=2)
        if ctx.rank == 0:
            impl.plot_costs(rows, picture)
        fields = ("nbytes", "seconds", "algorithm_bandwidth", "bus_bandwidth")
        return [[r.strategy, *(float(getattr(r, f)) for f in fields)] for r in rows]

    results = run(body, 2)
    got = [(row[0], int(row[1])) for row in results[0]]
    want = [(s, n) for s in ("root", "direct", "chain", "backend") for n in sizes]
    expect_equal(sorted(got), sorted(want), what="strategies and sizes", cause="missing-rows")
    for rank, rows in enumerate(results):
        expect_equal(rows, results[0], what="the rows of all ranks", rank=rank, cause="own-time")
        for name, nbytes, seconds, algorithm, bus in rows:
            if seconds <= 0 or abs(algorithm * seconds / nbytes - 1) > 1e-6 or bus != algorithm:
                fail(f"{name}: time and bandwidths don't fit: {rows}", cause="formula", rank=rank)
    ops = results.logs[0].ops()
    if not ops["send"] or ops["all_reduce"] < 6:
        fail("the strategies were not run: no messages in the ledger", cause="not-run")
    header = picture.read_bytes()[:8] if picture.exists() else b""
    expect_equal(header, b"\x89PNG\r\n\x1a\n", what="the picture's first bytes", cause="no-plot")


@trace("1.9")
def trace_comparison(impl):
    """The four strategies on 400 kB, timed."""

    def body(ctx):
        impl.compare_strategies([400_000], warmup=1, repeats=3)
        return torch.zeros(0)

    return body
