"""Checks of exercise 1.9: measuring communication. No absolute time is asserted."""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase1.groups import group_of

QUEUE = 0.02  # seconds of work that the stand-in device has queued
OUTLIER = 0.2


@exercise("1.9", "virtual", asserts="queued")
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


@exercise("1.9", "virtual", asserts="queued life")
def test_work_of_before_is_not_counted(impl, run):
    """Work queued before the timed call, warm-up included, is not part of its time."""

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
                "earlier work when the clock started",
                cause="not-synchronised-before",
                rank=rank,
            )


@exercise("1.9", "virtual", asserts="runs median")
def test_warmup_repeats_and_median(impl, run):
    """Warm-up calls are not timed, every repeat is, and one disturbed repeat does not matter."""

    def body(ctx):
        calls = []

        def fn():
            calls.append(time.perf_counter())
            if len(calls) in (1, 2, 5):  # both warm-up calls and the third of 5 repeats
                time.sleep(OUTLIER)

        seconds = impl.time_collective(fn, warmup=2, repeats=5)
        waits = iter((0.0, 40 * QUEUE, 4 * QUEUE, 0.0))
        even = impl.time_collective(lambda: time.sleep(next(waits)), warmup=0, repeats=4)
        return len(calls), seconds, even

    for rank, (calls, seconds, even) in enumerate(run(body, 2)):
        if not 1.8 * QUEUE < even < 3.5 * QUEUE:
            fail(
                f"repeats of 0, {40 * QUEUE}, {4 * QUEUE} and 0 s. The median is {2 * QUEUE} s, "
                f"the mean of the two in the middle, got {even:.3f} s",
                cause="not-the-median",
                rank=rank,
            )
        expect_equal(
            calls, 7, what="calls for warmup=2, repeats=5", rank=rank, cause="wrong-number-of-calls"
        )
        if seconds > OUTLIER / 5:
            fail(
                f"{seconds:.3f} s reported, but 4 of 5 repeats take no time. Warm-up calls are "
                "timed, or the mean is taken instead of the median",
                cause="not-the-median",
                rank=rank,
            )


@exercise("1.9", "virtual", asserts="slowest same barrier")
def test_slowest_rank_counts_everywhere(impl, run):
    """Of each run the slowest rank's time counts, and every rank reports the same."""

    def body(ctx):
        begun, ended = [], []

        def fn():  # another rank is slow in each run
            begun.append(time.monotonic())
            time.sleep(QUEUE if len(ended) == ctx.rank else 0.0)
            ended.append(time.monotonic())

        return impl.time_collective(fn, warmup=0, repeats=3), begun, ended

    results = run(body, 3)
    for rank, (seconds, begun, _) in enumerate(results):
        if not isinstance(seconds, float):
            fail(f"expected a float, got {seconds!r}", cause="type", rank=rank)
        for turn in (1, 2):
            if begun[turn] < max(ended[turn - 1] for _, _, ended in results):
                text = f"run {turn + 1} begins on rank {rank} before run {turn} has ended on "
                fail(f"{text}every rank: all meet before each run", cause="no-barrier", rank=rank)
        if seconds < QUEUE * 0.9:
            fail(
                f"in each of 3 runs another rank takes {QUEUE} s, but rank {rank} reports "
                f"{seconds:.6f} s. Take the slowest rank of each run, then the median of the runs",
                cause="own-time",
                rank=rank,
            )
        expect_equal(seconds, results[0][0], what="reported time", rank=rank, cause="own-time")


@exercise("1.9", "virtual", asserts="group-only same group alone")
def test_times_of_two_groups(impl, run):
    """Two groups measure at once, and each has its own slowest rank."""
    groups = ([3, 1], [2, 0])

    def body(ctx):
        group = [group_of(ranks) for ranks in groups][1 - ctx.rank % 2]
        wait = {3: 0.0, 1: 6 * QUEUE, 2: QUEUE, 0: 0.0}[ctx.rank]
        repeats = 3 if ctx.rank % 2 else 1
        options = {"warmup": 0, "repeats": repeats, "group": group}
        seconds = impl.time_collective(lambda: time.sleep(wait), **options)
        share = impl.communication_share(lambda: time.sleep(wait), lambda: None, **options)
        sizes = [8 if ctx.rank % 2 else 16]
        rows = impl.compare_strategies(sizes, **options)
        return seconds, share, [float(r.bus_bandwidth / r.algorithm_bandwidth) for r in rows]

    for rank, (seconds, share, factors) in enumerate(run(body, 4)):
        least, most = (6 * QUEUE, 60 * QUEUE) if rank % 2 else (QUEUE, 5 * QUEUE)
        if not 0.9 * least < seconds < most:
            fail(
                f"the slowest rank of the group {groups[1 - rank % 2]} takes {least} s, but rank "
                f"{rank} reports {seconds:.6f} s",
                cause="wrong-group",
                rank=rank,
            )
        if not 0.5 < share <= 1.0:
            fail(f"expected a share near 1, got {share}", cause="share", rank=rank)
        expect_equal(len(factors), 4, what="rows of a group", rank=rank, cause="missing-rows")
        what = "bus bandwidth by algorithm bandwidth in a group of 2 of 4 ranks, 2(W-1)/W"
        factors = [round(factor, 6) for factor in factors]
        expect_equal(factors, [1.0] * 4, what=what, rank=rank, cause="wrong-group")


@exercise("1.9", "virtual", asserts="barrier queued")
def test_ranks_start_together(impl, run):
    """A late rank does not make the call of the other ranks look slow; sync is called after it."""

    def body(ctx):
        told = []

        def fn():
            told.append(("fn", time.monotonic()))
            dist.barrier()

        if ctx.rank == 1:
            time.sleep(5 * QUEUE)
        come = time.monotonic()
        devices = []

        def sync(device):
            told.append(("sync", time.monotonic()))
            devices.append(str(device))

        seconds = impl.time_collective(fn, warmup=0, repeats=1, sync=sync, device="cpu:0")
        begun = [name for name, _ in told].index("fn")
        return seconds, come, max((at for _, at in told[:begun]), default=None), devices

    results = run(body, 2)
    late = results[1][1]
    for rank, (seconds, _, synced, devices) in enumerate(results):
        what = "devices that sync is called with"
        expect_equal(set(devices), {"cpu:0"}, what=what, rank=rank, cause="device")
        if seconds > 3 * QUEUE:
            fail(
                f"{seconds:.3f} s for a barrier: waiting for a late rank was counted; "
                "let all ranks meet before the clock starts",
                cause="no-barrier",
                rank=rank,
            )
        if synced is None or synced < late:
            text = "sync(device) was not called between the barrier and the timed call: what the "
            text += "barrier itself queues on the device would be counted"
            fail(text, cause="not-synchronised-before", rank=rank)


@exercise("1.9", asserts="bandwidth")
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


@exercise("1.9", "virtual", asserts="share")
def test_share_of_a_step(impl, run):
    """The share of a step spent communicating, between 0 and 1."""

    def body(ctx):
        slow = lambda: time.sleep(8 * QUEUE)
        fast = lambda: time.sleep(2 * QUEUE)
        options = {"warmup": 0, "repeats": 1}
        shares = [
            impl.communication_share(slow, fast, **options),
            impl.communication_share(fast, slow, **options),
        ]
        told: list[str] = []
        options = {"warmup": 2, "repeats": 3, "sync": lambda device: told.append("sync")}
        calls = (lambda: told.append("with")), (lambda: told.append("without"))
        impl.communication_share(*calls, **options)
        return *shares, [told.count(name) for name in ("with", "without", "sync")]

    for rank, (share, negative, told) in enumerate(run(body, 2)):
        what = "calls with and without communication, warmup=2, repeats=3 given"
        expect_equal(told[:2], [5, 5], what=what, rank=rank, cause="options")
        what = "sync is called around each of the 6 timed runs"
        expect_equal(told[2] >= 12, True, what=what, rank=rank, cause="options")
        if not 0.6 < share < 0.9:
            fail(
                f"a step of {8 * QUEUE} s that takes {2 * QUEUE} s without communication: "
                f"expected a share near 0.75, got {share:.3f}",
                cause="share",
                rank=rank,
            )
        expect_equal(negative, 0.0, what="the share when noise makes it negative", rank=rank)


@exercise("1.9", "virtual", asserts="rows same cost dtype")
def test_comparison_of_strategies(impl, run):
    """A row per strategy and size, the backend's own for comparison; the rows name what was run."""
    sizes = [4_000, 4]
    names = ("root", "direct", "chain", "backend")

    def body(ctx):
        with ctx.region("compare"):
            rows = impl.compare_strategies(sizes, warmup=1, repeats=2)
        fields = ("nbytes", "seconds", "algorithm_bandwidth", "bus_bandwidth")
        return [[r.strategy, *(float(getattr(r, f)) for f in fields)] for r in rows]

    results = run(body, 3)
    want = sorted((name, size) for name in names for size in sizes)
    for rank, rows in enumerate(results):
        got = [(row[0], int(row[1])) for row in rows]
        what = "strategies and sizes"
        expect_equal(sorted(got), want, what=what, rank=rank, cause="missing-rows")
        for name in names:
            order = [size for strategy, size in got if strategy == name]
            expect_equal(order, sizes, what=f"order of {name}", rank=rank, cause="missing-rows")
        expect_equal(rows, results[0], what="the rows of all ranks", rank=rank, cause="own-time")
        for name, nbytes, seconds, algorithm, bus in rows:
            fits = seconds > 0 and abs(algorithm * seconds / nbytes - 1) < 1e-6
            if not fits or abs(bus / algorithm - 4 / 3) > 1e-6:
                fail(f"{name}: time and bandwidths don't fit: {rows}", cause="formula", rank=rank)
        log = results.logs[rank].select(region="compare")
        sent = Counter(e.payload for e in log.select("send").events if e.payload in sizes)
        each = 3 * {0: 2 + 2 + 1, 1: 1 + 2 + 2, 2: 1 + 2 + 1}[rank]  # root, direct, chain
        want_sent = dict.fromkeys(sizes, each)
        what = "messages per size of root, direct and chain, 3 runs each"
        expect_equal(dict(sent), want_sent, what=what, rank=rank, cause="not-run")
        kinds = {e.dtype for e in log.events if e.payload == 4_000}
        expect_equal(kinds, {"float32"}, what="dtypes of the tensors", rank=rank, cause="dtype")
        reduced = [e.payload for e in log.select("all_reduce").events]
        if reduced.count(4_000) != 3:
            times = reduced.count(4_000)
            text = f"the backend's all-reduce of 4,000 bytes ran {times} times, not 3"
            fail(text, cause="not-run", rank=rank)


TIMES = {  # of each strategy, by size: lines of other lengths, mixed up
    "direct": {4: 7e-3},
    "chain": {4: 1e-3, 400: 2e-3, 40_000: 5e-3},
    "root": {4: 3e-3, 400: 4e-3, 40_000: 9e-3},
    "backend": {400: 8e-3},
}
UNITS = {1: r"\bs\b|\bsec", 1e3: r"\bms\b|milli", 1e6: r"[uµμ]s\b|micro|mu", 1e9: r"\bns\b|nano"}


PICTURES = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml"}  # how the files begin


def drawn(impl, folder) -> dict:
    """The contents of the picture when it is saved, and the beginnings of
    the files in ``folder``."""
    from matplotlib import pyplot
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    seen: dict = {}
    save = Figure.savefig

    def look(figure, *args, **kwargs):
        axes = figure.axes[0]
        legend = axes.get_legend() or next(iter(figure.legends), None)
        seen["scales"] = axes.get_xscale(), axes.get_yscale()
        seen["labels"] = axes.get_xlabel(), axes.get_ylabel()
        texts = [] if legend is None else [t.get_text() for t in legend.get_texts()]
        keys = [] if legend is None else [to_hex(h.get_color()) for h in legend.get_lines()]
        seen["legend"], name_of = texts, dict(zip(keys, texts, strict=False))
        lines = [line for line in axes.get_lines() if len(line.get_xdata())]
        seen["lines"] = [
            [
                name_of.get(to_hex(line.get_color()), line.get_label()),
                [float(v) for v in line.get_xdata()],
                [float(v) for v in line.get_ydata()],
            ]
            for line in lines
        ]
        return save(figure, *args, **kwargs)

    rows = [
        impl.Row(name, size, seconds, 1.0, 1.0)
        for name, times in TIMES.items()
        for size, seconds in times.items()
    ]
    rows.sort(key=lambda row: row.nbytes)  # the rows of a strategy are no neighbours
    before = pyplot.get_fignums()
    Figure.savefig = look
    path = Path(folder) / "costs.png"
    try:
        impl.plot_costs(rows, path)
    finally:
        Figure.savefig = save
    impl.plot_costs(rows, str(path.with_suffix(".svg")))
    files = {ending: path.with_suffix(ending) for ending in PICTURES}
    begins = {e: f.read_bytes()[: len(PICTURES[e])] for e, f in files.items() if f.exists()}
    return seen | {"left": pyplot.get_fignums() != before, "begins": begins}


@exercise("1.9", asserts="picture output resources")
def test_picture_of_costs(impl, run):
    """Time over size, both axes logarithmic, one named line per strategy."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            return drawn(impl, folder)

    seen = run(body, 1, process_group=False)[0]
    for ending, begin in PICTURES.items():
        expect_equal(
            seen["begins"].get(ending, b""),
            begin,
            what=f"the first bytes of costs{ending}",
            cause="no-plot",
        )
    expect_equal(seen["left"], False, what="a figure is left open", cause="figure-open")
    if "lines" not in seen:
        return  # written in another way than by Figure.savefig: only the file can be looked at
    expect_equal(seen["scales"], ("log", "log"), what="scales of the axes", cause="scale")
    expect_equal(sorted(seen["legend"]), sorted(TIMES), what="the legend", cause="legend")
    lines = {name: (xs, ys) for name, xs, ys in seen["lines"]}
    expect_equal(sorted(lines), sorted(TIMES), what="lines in the picture", cause="lines")
    factor = lines["chain"][1][0] / TIMES["chain"][4]
    for name, (xs, ys) in lines.items():
        what = f"sizes of {name} along the x axis"
        expect_equal(xs, [float(size) for size in TIMES[name]], what=what, cause="lines")
        got = [round(y / factor, 9) for y in ys]
        what = f"times of {name} in seconds"
        expect_equal(got, list(TIMES[name].values()), what=what, cause="lines")
    x_label, y_label = (str(label).lower() for label in seen["labels"])
    if not re.search(r"byte|\bb\b", x_label):
        fail(f"the x axis needs a label with its unit, bytes; it is {x_label!r}", cause="labels")
    unit = UNITS.get(float(f"{factor:.9g}"), "a unit that the numbers do not have")
    if not re.search(unit, y_label):
        text = f"{TIMES['chain'][4]} s are drawn as {lines['chain'][1][0]:g}, but the label of the "
        fail(f"{text}y axis, {y_label!r}, does not name that unit of time", cause="labels")


@trace("1.9")
def trace_comparison(impl):
    """The four strategies on 400 kB, timed."""

    def body(ctx):
        impl.compare_strategies([400_000], warmup=1, repeats=3)
        return torch.zeros(0)

    return body
