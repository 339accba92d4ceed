"""Checks of exercise 4.19: profiles are read, and the planted bottleneck is found."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from distlab.grading import exercise, expect_equal, expect_refused, refusal
from tests.phase4.planted_profiles import BOTTLENECKS, cpu_profile, gpu_profile
from tests.phase4.profile_spans import expect_spans, plain
from tests.phase4.profile_truth import (
    small_traces,
    true_gaps,
    true_growth,
    true_kept,
    true_parts,
    window_of,
)
from tests.phase4.profile_writing import write_snapshot, write_trace


@exercise(
    "4.19",
    "virtual",
    asserts="spans device exact lanes launched never-launched gpu-changes left-out",
)
def test_a_gpus_trace_becomes_spans(impl, run, seed):
    """Work of the streams with its launches, marks of the host, memory of the GPU; exact times."""
    planted = BOTTLENECKS[seed % len(BOTTLENECKS)]

    def body(ctx):
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for name, memory in (("a.json", 1), ("b.json.gz", None)):
                path = Path(folder, name)
                write_trace(gpu_profile(planted, seed)[0], path, memory=memory)
                read = impl.read_trace(path if memory else str(path))
                found.append((plain(read.spans), plain(read.changes)))
        return found

    profile, _ = gpu_profile(planted, seed)
    (spans, changes), (again, none) = run(body, 1)[0]
    expect_spans(spans, profile, "a trace of a GPU")
    expect_spans(again, profile, "the same trace, compressed")
    want = [(at, size, place, "") for at, size, place, _ in profile.changes]
    expect_equal(changes, want, what="changes of the GPU's memory", cause="changes")
    expect_equal(none, [], what="changes in a trace without memory", cause="changes")


@exercise("4.19", "virtual", asserts="spans host outermost loader cpu-changes left-out exact")
def test_a_cpus_trace_becomes_spans(impl, run, seed):
    """The outermost operators, not the loader's; gloo's messages; memory of the CPU."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            write_trace(cpu_profile("memory", seed)[0], path, memory=0)
            read = impl.read_trace(path)
        return plain(read.spans), plain(read.changes)

    profile, _ = cpu_profile("memory", seed)
    spans, changes = run(body, 1)[0]
    expect_spans(spans, profile, "a trace of a CPU")
    expect_equal(changes, profile.changes, what="changes of the CPU's memory", cause="changes")


HOST = {"pid": 7, "tid": 7}
STEP = {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 10, "dur": 20}
KERNEL = {"cat": "kernel", "name": "k", "ts": 12, "dur": 1}
OPERATOR = {"cat": "cpu_op", "name": "aten::mul", "ts": 12, "dur": 0}
LOADER = {"cat": "user_annotation", "name": "enumerate(DataLoader)#", "ts": 11, "dur": 3}
CALL = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 11, "dur": 1}
LATER = {"ts": 22}
GLOO = {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": 15, "dur": 2, "tid": 9}
TINY = {  # events, and the kinds with launches and begins (in µs) that must be found
    "a step alone": ([STEP], ["step 10 10"]),
    "kernels around": (
        [KERNEL, STEP, KERNEL | LATER],
        ["compute 12 12", "compute 22 22", "step 10 10"],
    ),
    "calls around": (
        [
            CALL | {"args": {"correlation": 1}},
            KERNEL | {"args": {"correlation": 1}},
            STEP,
            KERNEL | LATER | {"args": {"correlation": 2}},
            CALL | {"args": {"correlation": 2}, "ts": 15},
        ],
        ["compute 11 12", "compute 15 22", "step 10 10"],
    ),
    "operators of 0 µs": (
        [OPERATOR, STEP, OPERATOR | LATER],
        ["compute 12 12", "compute 22 22", "step 10 10"],
    ),
    "loaders around": (
        [LOADER, OPERATOR, STEP, OPERATOR | LATER, LOADER | {"ts": 21}],
        ["data 11 11", "data 21 21", "step 10 10"],
    ),
    "gloo beside a GPU": (
        [KERNEL, STEP, GLOO, KERNEL | {"name": "ncclDevKernel_AllReduce", "ts": 18}],
        ["communication 15 15", "communication 18 18", "compute 12 12", "step 10 10"],
    ),
    "nccl inside other names": (
        [
            KERNEL | {"name": "void pack_for_nccl(…)"},
            STEP,
            KERNEL | {"cat": "gpu_memcpy", "name": "Memcpy DtoD (to_nccl)", "ts": 15},
        ],
        ["compute 12 12", "copy 15 15", "step 10 10"],
    ),
    "operators that overlap": (
        [OPERATOR | {"dur": 4}, STEP, OPERATOR | {"ts": 14, "dur": 4}],
        ["compute 12 12", "compute 14 14", "step 10 10"],
    ),
    "operators of two threads": (
        [OPERATOR | {"dur": 4}, STEP, OPERATOR | {"ts": 13, "dur": 1, "tid": 8}],
        ["compute 12 12", "compute 13 13", "step 10 10"],
    ),
    "a loader of another thread": (
        [LOADER | {"tid": 8}, STEP, OPERATOR | {"dur": 1}],
        ["compute 12 12", "data 11 11", "step 10 10"],
    ),
    "operators partly in the loader": (
        [LOADER, STEP, OPERATOR | {"ts": 10, "dur": 2}, OPERATOR | {"ts": 13, "dur": 2}],
        ["compute 10 10", "compute 13 13", "data 11 11", "step 10 10"],
    ),
}


@exercise("4.19", "virtual", asserts="spans host device outermost loader launched lanes")
def test_traces_of_few_events(impl, run):
    """None is left out because of its place, because it takes no time, or for another thread's."""

    def body(ctx):
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            for name, (events, _) in TINY.items():
                complete = [{"ph": "X", "args": {}, **HOST, **event} for event in events]
                path.write_text(json.dumps({"traceEvents": complete}))
                spans = impl.read_trace(path).spans
                found[name] = sorted(
                    f"{s.kind} {s.launched // 1000} {s.begin // 1000}" for s in spans
                )
        return found

    for name, got in run(body, 1)[0].items():
        expect_equal(got, TINY[name][1], what=f"a trace with {name}", cause="few-events")


@exercise("4.19", "virtual", asserts="snapshot site snapshot-device")
def test_a_snapshot_becomes_changes(impl, run, seed):
    """Of one device: bytes taken and free again, and the first line outside of torch."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "memory.pickle")
            write_snapshot(gpu_profile("memory", seed)[0], path)
            return plain(impl.read_snapshot(path, 1)), plain(impl.read_snapshot(str(path)))

    profile, _ = gpu_profile("memory", seed)
    changes, first = run(body, 1)[0]
    counted = [c[:3] for c in changes]
    expect_equal(
        counted, [c[:3] for c in profile.changes], what="times, bytes, addresses", cause="changes"
    )
    for got, want in zip(changes, profile.changes, strict=True):
        expect_equal(got[3], want[3], what=f"the site of {want[:3]}", cause="site")
    expect_equal(first, [], what="changes of device 0, which only has a segment", cause="changes")


@exercise("4.19", "virtual", asserts="refusals")
def test_files_that_are_no_profile_are_refused(impl, run, seed):
    """No trace, no step, no snapshot, no such device: ValueError."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            profile = gpu_profile("compute", seed)[0]
            write_snapshot(profile, here / "memory.pickle")
            profile.events = [e for e in profile.events if "ProfilerStep" not in e["name"]]
            write_trace(profile, here / "no_step.json")
            (here / "torn.json").write_bytes((here / "no_step.json").read_bytes()[:400])
            (here / "list.json").write_text("[1, 2]")
            (here / "torn.pickle").write_bytes((here / "memory.pickle").read_bytes()[:400])
            calls = [refusal(impl.read_trace, here / f"{n}.json") for n in TRACES]
            return [
                *calls,
                refusal(impl.read_snapshot, here / "torn.pickle"),
                refusal(impl.read_snapshot, here / "memory.pickle", 2),
            ]

    TRACES = ("no_step", "torn", "list")
    words = ["a trace without a step", "half a trace", "a list", "half a snapshot", "device 2 of 2"]
    expect_refused(run(body, 1), words)


@exercise("4.19", "virtual", asserts="parts window sum order-of-parts gaps life")
def test_parts_and_gaps_of_small_traces(impl, run, seed):
    """Every moment has one part, the first that runs; a lane waits only for a late host."""

    def body(ctx):
        found = []
        for trace in small_traces(seed).values():
            before = repr(trace)
            found.append((impl.parts(trace), list(impl.launch_gaps(trace).items())))
            if repr(trace) != before or impl.parts(trace) != found[-1][0]:
                return found, False
        return found, True

    found, same = run(body, 1)[0]
    expect_equal(same, True, what="the trace, and a second call's parts", cause="changed-input")
    for (name, trace), (parts, gaps) in zip(small_traces(seed).items(), found, strict=True):
        low, high = window_of(trace.spans)
        what = f"the sum of the parts of {name}"
        expect_equal(sum(parts.values()), high - low, what=what, cause="sum")
        want = true_parts(trace.spans)
        expect_equal(parts, want, what=f"parts of {name}, {trace.spans}", cause="parts")
        expect_equal(list(parts), list(want), what="the order of the parts", cause="part-order")
        want = true_gaps(trace.spans)
        expect_equal(dict(gaps), want, what=f"gaps of {name}, {trace.spans}", cause="gaps")


@exercise("4.19", "virtual", asserts="growth kept")
def test_growth_and_what_is_kept(impl, run, seed):
    """Bytes from step to step, and the lines whose bytes are still in use at the end."""

    def body(ctx):
        return [
            (list(impl.growth(t, iter(t.changes))), impl.kept(t, iter(t.changes)))
            for t in small_traces(seed).values()
        ]

    for (name, trace), (grown, kept) in zip(
        small_traces(seed).items(), run(body, 1)[0], strict=True
    ):
        what = f"of {name}, {trace.changes}"
        want = true_growth(trace.spans, trace.changes)
        expect_equal(grown, want, what=f"growth {what}", cause="growth")
        want = true_kept(trace.spans, trace.changes)
        expect_equal(dict(kept), want, what=f"kept {what}", cause="kept")
