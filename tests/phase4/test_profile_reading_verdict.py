"""Checks of exercise 4.19: the planted bottleneck is found, with its evidence."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from distlab.grading import exercise, expect_equal, trace
from given.profile_files import Change, Span, Trace
from tests.phase4.planted_profiles import BOTTLENECKS, Profile, cpu_profile, gpu_profile
from tests.phase4.profile_spans import expect_spans, plain
from tests.phase4.profile_truth import true_growth, true_kept, true_parts, window_of
from tests.phase4.profile_writing import write_snapshot, write_trace
from tests.phase4.recorded_profiles import recorded, recorded_truth

CPU_BOTTLENECKS = tuple(b for b in BOTTLENECKS if b != "copy")  # a CPU copies by operators


def planted_files(folder: str, kind: str, planted: str, seed: int) -> tuple[Path, Path | None]:
    """The files of a planted run: a trace, and for a GPU a snapshot."""
    path = Path(folder, f"{kind}-{planted}.json")
    if kind == "cpu":
        write_trace(cpu_profile(planted, seed)[0], path, memory=0)
        return path, None
    profile = gpu_profile(planted, seed)[0]
    write_trace(profile, path)
    write_snapshot(profile, path.with_suffix(".pickle"))
    return path, path.with_suffix(".pickle")


@exercise("4.19", "virtual", asserts="planted evidence from-snapshot")
def test_the_planted_bottleneck_is_found(impl, run, seed):
    """On a GPU and on a CPU: the part, its ns or bytes, the spans behind it, collective or line."""
    runs = [("gpu", b) for b in BOTTLENECKS] + [("cpu", b) for b in CPU_BOTTLENECKS]

    def body(ctx):
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for kind, planted in runs:
                path, memory = planted_files(folder, kind, planted, seed)
                changes = None if memory is None else impl.read_snapshot(memory, 1)
                changes = changes and iter(changes)
                found.append(dataclasses.astuple(impl.bottleneck(impl.read_trace(path), changes)))
        return found

    for (kind, planted), got in zip(runs, run(body, 1)[0], strict=True):
        profile, collective = (gpu_profile if kind == "gpu" else cpu_profile)(planted, seed)
        what = f"the bottleneck of a run on a {kind.upper()} with {planted}"
        expect_equal(got[0], planted, what=what, cause="bottleneck")
        expect_equal(got[1:], evidence(profile, planted, collective), what=what, cause="evidence")


def evidence(profile: Profile, planted: str, collective: str) -> tuple:
    """The numbers behind a planted bottleneck: amount, whole, count, detail."""
    spans = [Span(*s) for s in profile.spans]
    changes = [Change(*c) for c in profile.changes]
    low, high = window_of(spans)
    if planted == "memory":
        kept = true_kept(spans, changes)
        worst = min(kept, key=lambda site: (-kept[site], site))
        steps = sum(s.kind == "step" for s in spans)
        return min(true_growth(spans, changes)), sum(kept.values()), steps, worst
    inside = [s for s in spans if low <= s.launched < high]
    in_update = {
        s
        for s in inside
        for u in spans
        if u.kind == "optimizer" and u.begin <= s.launched < u.end and s.kind == "compute"
    }
    compute = {s for s in inside if s.kind == "compute"}
    behind = {"optimizer": in_update, "launch": compute - in_update}.get(planted)
    if behind is None:
        behind = {s for s in inside if s.kind == planted}
    detail = ""
    if planted == "communication":
        detail = collective
        behind = {s for s in behind if collective in s.name.lower().replace("_", "")}
    return true_parts(spans)[planted], high - low, len(behind), detail


@exercise("4.19", "virtual", asserts="recorded spans outermost planted evidence exact")
def test_recorded_profiles_are_read(impl, run):
    """Traces of real runs: their spans, what each run loses its time to, and its growth."""
    written = {reason: path.read_bytes() for reason, path in recorded().items()}

    def body(ctx):
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json.gz")
            for reason, content in written.items():
                path.write_bytes(content)
                read = impl.read_trace(path)
                finding = dataclasses.astuple(impl.bottleneck(read))
                found[reason] = plain(read.spans), plain(read.changes), finding
        return found

    for reason, (spans, changes, finding) in run(body, 1)[0].items():
        profile = Profile()
        profile.spans, profile.changes = recorded_truth(recorded()[reason])
        what = f"the recorded run with {reason}"
        expect_spans(spans, profile, what)
        expect_equal(changes, profile.changes, what=f"memory of {what}", cause="changes")
        expect_equal(finding[0], reason, what=f"the bottleneck of {what}", cause="bottleneck")
        want = evidence(profile, reason, "allgather" if reason == "communication" else "")
        expect_equal(finding[1:], want, what=f"evidence in {what}", cause="evidence")


def piece(
    kind: str, name: str, begin: int, end: int, lane: int = 7, *, launched: int | None = None
) -> Span:
    """A span of a few ns, launched at its begin if nothing else is said."""
    return Span(kind, name, (0, lane), begin, end, begin if launched is None else launched)


def steps_to(*ends: int) -> list[Span]:
    """Steps one after the other, from 0 on."""
    return [piece("step", "s", a, b, 1) for a, b in zip((0, *ends), ends, strict=False)]


def busy_to(end: int) -> list[Span]:
    """Two steps in 100 ns, and compute until ``end``."""
    return [*steps_to(50, 100), piece("compute", "k", 0, end)]


def queued(kind: str, name: str) -> list[Span]:
    """One step from 10 to 110: two spans were launched before it, two in it, one after it."""
    times = ((12, 16, 3), (16, 20, 5), (20, 80, 15), (115, 120, 109), (130, 135, 125))
    return [
        piece("step", "s", 10, 110, 1),
        *(piece(kind, name, a, b, launched=at) for a, b, at in times),
    ]


BUSY = [*steps_to(100), piece("compute", "k", 0, 70), piece("compute", "k", 95, 100)]
FULL = [*steps_to(10, 20, 30), piece("compute", "k", 0, 30)]
GROWN = tuple(
    Change(at, size, at, site)
    for at, size, site in (
        (15, 6, "b.py:1"), (16, 4, "a.py:2"), (25, 7, "b.py:1"), (26, 5, "a.py:2"),
        (27, 4, "a.py:2"),
    )
)  # fmt: skip
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum(…)"
EQUAL = [piece("copy", "m", 70, 80), piece("data", "d", 80, 85)]
UPDATE = [
    *steps_to(100),
    piece("optimizer", "o", 40, 80, 1),
    *(piece("compute", "k", a, b) for a, b in ((0, 40), (40, 50), (80, 100))),
]
OVERLAP = [
    piece("communication", "gloo:send", 60, 82, 3),
    piece("communication", ALL_REDUCE, 71, 84, 4),
    piece("communication", "ncclKernel_Broadcast_RING_LL_Sum_float(…)", 120, 190, 4),
]
SENT = [
    *steps_to(100),
    *(piece("compute", "k", a, b) for a, b in ((0, 40), (95, 100))),
    *(piece("communication", "gloo:send", a, b, 3) for a, b in ((40, 50), (80, 88))),
    *(
        piece("communication", "gloo:recv", a, b, 3)
        for a, b in ((52, 57), (58, 63), (64, 69), (96, 100))
    ),
]
ONE = [*steps_to(100), piece("communication", "gloo:send", 10, 90)]
PAUSED = [
    *(piece("step", "s", a, b, 1) for a, b in ((0, 40), (60, 100))),
    piece("compute", "k", 0, 40),
    piece("compute", "k", 60, 100, launched=50),
]
BEFORE = [piece("communication", "gloo:broadcast", -200, 9, 4)]
TIED = [piece("communication", "gloo:send", 70, 82), piece("communication", "gloo:recv", 72, 84, 4)]
LIMITS = {  # spans, options (the trace's changes are GROWN), and the finding
    "10 of 100 ns lost": (busy_to(90), {}, ("launch", 10, 100, 1, "")),
    "9 of 100 ns lost": (busy_to(91), {}, ("compute", 91, 100, 1, "")),
    "9 of 100 ns, share 0.09": (busy_to(91), {"share": 0.09}, ("launch", 9, 100, 1, "")),
    "a kernel at the end": (
        [*busy_to(90), piece("compute", "k", 100, 105)],
        {},
        ("launch", 10, 100, 1, ""),
    ),
    "kernels at both ends of an update": (UPDATE, {}, ("optimizer", 30, 100, 1, "")),
    "copy as long as launch": (BUSY + EQUAL, {}, ("copy", 10, 100, 1, "")),
    "two that overlap": (BUSY + OVERLAP, {}, ("communication", 14, 100, 1, "allreduce")),
    "two operations alike": (BUSY + TIED, {}, ("communication", 14, 100, 1, "recv")),
    "several of two operations": (SENT, {}, ("communication", 33, 100, 2, "send")),
    "one operation": (ONE, {}, ("communication", 80, 100, 1, "send")),
    "time between two steps": (PAUSED, {}, ("launch", 20, 100, 2, "")),
    "kernels queued at the ends": (queued("compute", "k"), {}, ("launch", 32, 100, 2, "")),
    "kernels queued at the ends, share 0.9": (
        queued("compute", "k"),
        {"share": 0.9},
        ("compute", 68, 100, 2, ""),
    ),
    "copies queued at the ends": (queued("copy", "m"), {}, ("copy", 68, 100, 2, "")),
    "a broadcast before the first step": (
        queued("communication", "gloo:send") + BEFORE,
        {},
        ("communication", 68, 100, 2, "send"),
    ),
    "10 bytes more": (FULL, {"leak": 10}, ("memory", 10, 26, 3, "a.py:2")),
    "10 bytes more, leak 11": (FULL, {"leak": 11}, ("compute", 30, 30, 1, "")),
    "two steps": ([*steps_to(10, 30), FULL[-1]], {"leak": 10}, ("compute", 30, 30, 1, "")),
    "no changes given": (FULL, {"leak": 10, "changes": ()}, ("compute", 30, 30, 1, "")),
}


@exercise("4.19", "virtual", asserts="thresholds ties first-operation half-open evidence")
def test_where_the_verdict_turns(impl, run):
    """Shares and bytes at their limits, equal parts, two operations that overlap, two steps."""

    def body(ctx):
        return [
            dataclasses.astuple(impl.bottleneck(Trace(tuple(spans), GROWN), **options))
            for spans, options, _ in LIMITS.values()
        ]

    for (name, (_, _, want)), got in zip(LIMITS.items(), run(body, 1)[0], strict=True):
        expect_equal(got, want, what=f"the bottleneck with {name}", cause="limits")


@trace("4.19")
def scenario(impl):
    """The files of a run are read, and the bottleneck is found."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            path, memory = planted_files(folder, "gpu", "data", 3)
            ctx.start_picture()
            with ctx.span("read"):
                read, changes = impl.read_trace(path), impl.read_snapshot(memory, 1)
            with ctx.span("judge"):
                impl.bottleneck(read, changes)

    return body
