"""Checks of exercise 4.12: the files and ports for the numbers, on one rank,
through kills and busy ports."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import torch
import torch._dynamo  # a profiler imports most of it: once here, not per rank
import torch.distributed as dist
import torch.utils.tensorboard  # takes a second, too
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.grading.checks import expect_refusals, refusal

# a Mapping, as sinks are promised, and no dict: it can't be written to
NUMBERS = MappingProxyType(
    {"loss": 1.5, "mfu": None, "samples_per_second": 640.0, "stragglers": 0, "exposed": 0.0}
)


def lines_of(path) -> list[dict]:
    """All lines of a file, which must be JSON objects."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(json.loads(line, parse_constant=lambda word: fail_constant(word)))
        except ValueError:
            fail(f"line {number} is no JSON: {line[:60]!r}", cause="torn-line")
    return found


def fail_constant(word: str) -> None:
    fail(f"{word} is no JSON: other programs can't read it; write null", cause="not-json")


def alone(run, body):
    """The body's result on one rank that has a folder of its own: ``body(folder)``."""
    with tempfile.TemporaryDirectory() as folder:
        return run(lambda ctx: body(Path(folder)), 1, process_group=False)[0]


# -- JSON lines ------------------------------------------------------------------------------------
@exercise("4.12", "gloo", asserts="line-per-record on-disk null folders output")
def test_each_line_is_on_its_way_when_it_is_written(impl, run):
    """A process that is killed after a write has lost nothing: the line is in the file already."""

    def body(folder):
        sink = impl.JsonLines(folder / "new" / "metrics.jsonl")
        sink.write(0, NUMBERS)
        least = {"least": float("-inf"), "ranks": 4, "slow": 0}
        sink.write(1, MappingProxyType({"loss": float("nan"), "mfu": float("inf")} | least))
        before = Path(sink.path).read_text()
        sink.close()
        return before, Path(sink.path).read_text()

    before, after = alone(run, body)
    if before != after:
        fail("a line waits in the process's buffer: a kill would lose it", cause="not-on-disk")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        Path(file.name).write_text(after)
        unknown = dict.fromkeys(("loss", "mfu", "least"))
        want = [{"step": 0, **NUMBERS}, {"step": 1, **unknown, "ranks": 4, "slow": 0}]
        expect_equal(lines_of(file.name), want, what="the file's records")


def content(path: Path) -> str:
    """All bytes of a file, each as one letter."""
    return path.read_bytes().decode("latin-1")


@exercise("4.12", "gloo", asserts="resumed whole-lines life")
def test_resumed_file_is_that_of_a_run_without_a_kill(impl, run):
    """Killed anywhere in its last line, resumed from an older step: each step once, whole lines."""

    def body(folder):
        def write(path, steps, **options):
            sink = impl.JsonLines(path, **options)
            for step in steps:
                sink.write(step, {"loss": 1 / (step + 1), "näme": 2.0})
            sink.close()

        write(folder / "whole.jsonl", range(8))
        whole = content(folder / "whole.jsonl")
        write(folder / "killed.jsonl", range(6))
        killed = (folder / "killed.jsonl").read_bytes()
        last = len(killed.splitlines(keepends=True)[-1])
        found = []
        for lost in range(last + 1):
            for resume in (3, 5):
                path = folder / "resumed.jsonl"
                path.write_bytes(killed[: len(killed) - lost])
                read = [r["step"] for r in impl.read_json_lines(path)]
                write(path, range(resume, 8), first_step=resume)
                found.append((lost, resume, read, content(path)))
        return whole, found

    whole, found = alone(run, body)
    for lost, resume, read, text in found:
        where = f"{lost} bytes of the last line lost, resumed from step {resume}"
        expect_equal(read[:5], [0, 1, 2, 3, 4], what=f"steps read, {where}", cause="lost-records")
        if text != whole:
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
                readable = text.encode("latin-1").decode(errors="replace")
                Path(file.name).write_text(readable, encoding="utf-8")
                steps = [record["step"] for record in lines_of(file.name)]
            again = len(steps) != len(set(steps))
            fail(
                f"{where}: the file has steps {steps}",
                cause="repeated-steps" if again else "lost-records",
            )


@exercise("4.12", "gloo", asserts="never-lost alone")
def test_full_disk_while_mending(impl, run):
    """Old lines are still there if there is no room to write them anew. They are under their name
    at every moment: a kill may come between any two calls."""

    def body(folder):
        path = folder / "metrics.jsonl"
        text = "".join(json.dumps({"step": s, "loss": 0.5}) + "\n" for s in range(2000))
        path.write_text(text + '{"step": 20')
        missing, looking, killed = [], [True], []

        def look(event, _):  # before each call that opens, renames or removes a file
            if looking and event.partition(".")[0] in ("os", "open", "shutil"):
                missing.extend([event] * (not os.path.exists(path)))
            if killed and event == "os.rename":
                raise OSError(killed.pop())

        sys.addaudithook(look)
        impl.JsonLines(path, first_step=1995).close()
        looking.clear()
        killed.append("the process dies before the new file is in the old one's place")
        with contextlib.suppress(OSError):
            impl.JsonLines(path, first_step=1993)
        killed.clear()
        impl.JsonLines(path, first_step=1993).close()
        again = len(path.read_text().splitlines())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            with contextlib.suppress(OSError):
                impl.JsonLines(path, first_step=1990)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return missing, again, len(path.read_text().splitlines())

    missing, again, lines = alone(run, body)
    if missing:
        fail(
            f"before {missing[0]!r} there is no file of that name. A kill now loses all records "
            "(os.replace puts a new one in its place at once)",
            cause="lost-records",
        )
    what = "lines of a file that is opened again with first_step=1993 after a kill while it was"
    expect_equal(again, 1993, what=f"{what} opened", cause="repeated-steps")
    if lines < 1990:
        fail(
            f"of 2000 records {lines} are left, and no room for more. Kept records must be "
            "complete elsewhere before they replace these (a raw write may take less than it gets)",
            cause="lost-records",
        )


@exercise("4.12", "gloo", asserts="records-only in-order resumed no-other-file dtype")
def test_what_can_not_be_read_is_passed_over(impl, run):
    """Torn lines in the middle, other JSON, bytes that are no text."""

    def body(folder):
        path = folder / "metrics.jsonl"
        path.write_bytes(b'{"step": 0}\n{"step": 1, "lo{"step": 2}\n7\n\xff\xfe\n\n{"step": 3}\n')
        first = impl.read_json_lines(path), impl.read_json_lines(str(path))
        kept = []
        for number in (4, 2, 0):
            path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
            sink = impl.JsonLines(path, first_step=number)
            sink.write(2**60 + 1, {"big": 2**60 + 3, "small": 1e-300, "tenth": 0.1})
            sink.close()
            kept.append(lines_of(path))
        return *first, kept, sorted(p.name for p in folder.iterdir())

    records = [{"step": 0}, {"step": 1, "note": "ü"}, {"step": 2}, {"step": 3}]
    first, again, kept, files = alone(run, body)
    for found in (first, again):
        expect_equal(found, [{"step": 0}, {"step": 3}], what="records", cause="unreadable")
    last = {"step": 2**60 + 1, "big": 2**60 + 3, "small": 1e-300, "tenth": 0.1}
    for number, got in zip((4, 2, 0), kept, strict=True):
        want = [r for r in records if r["step"] < number]
        what = f"records of a file reopened with first_step={number}"
        expect_equal(got, [*want, last], what=what, cause="lost-records")
    expect_equal(files, ["metrics.jsonl"], what="files in the folder", cause="files-left")


# -- TensorBoard and Prometheus --------------------------------------------------------------------
@exercise("4.12", "gloo", asserts="curves output")
def test_tensorboard_reads_the_curves(impl, run):
    """Read back from the event files: names, steps, values; no point where nothing is known."""

    def body(folder):
        sink = impl.TensorBoard(folder)
        for step in (4, 9):
            sink.write(step, NUMBERS | {"loss": 1.5 / step})
        sink.close()
        points = []
        for path in sorted(folder.glob("events*")):
            for event in EventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    number = value.tensor.float_val[0]
                    points.append((value.tag, event.step, round(float(number), 6)))
        return sorted(points)

    want = [("loss", 4, 0.375), ("loss", 9, round(1.5 / 9, 6))]
    want += [("samples_per_second", 4, 640.0), ("samples_per_second", 9, 640.0)]
    want += [(name, step, 0.0) for name in ("stragglers", "exposed") for step in (4, 9)]
    expect_equal(alone(run, body), sorted(want), what="points of the curves", cause="curves")


def scraped(port: int) -> dict[str, str]:
    """The values that an endpoint serves, by name."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")


@exercise("4.12", "gloo", asserts="last-values life")
def test_prometheus_scrapes_the_last_values(impl, run):
    """Two endpoints in one process, any free port, values set many times, NaN for not known."""

    def body(folder):
        first, second = impl.Prometheus(0), impl.Prometheus(0)
        first.write(1, NUMBERS)
        first.write(2, NUMBERS | {"loss": None, "mfu": 0.4})
        second.write(7, {"loss": 9.0, "slow_rank3": 1.5})
        second.write(8, {"loss": 9.0})
        found = scraped(first.port), scraped(second.port)
        first.close()
        second.close()
        return found

    first, second = alone(run, body)
    want = {"training_step": 2.0, "training_samples_per_second": 640.0, "training_mfu": 0.4}
    want |= {"training_stragglers": 0.0, "training_exposed": 0.0}
    for name, value in want.items():
        expect_equal(float(first.get(name, "-1")), value, what=name, cause="stale")
    if (served := first.get("training_loss")) != "NaN":
        fail(f"the loss is not known any more, but {served} is served", cause="stale")
    expect_equal(float(second["training_loss"]), 9.0, what="the second endpoint's loss")
    if (served := second.get("training_slow_rank3", "NaN")) != "NaN":
        fail(
            f"slow_rank3 is not among the last metrics (the rank is well again), but its old value "
            f"{served} is served: expected NaN",
            cause="stale",
        )


@exercise("4.12", "gloo", asserts="host port-refused port-free no-thread resources refusals")
def test_endpoint_is_on_loopback_and_its_port_is_given_back(impl, run):
    """Nobody on the network can read it; a busy port gives one sentence; a closed port is free.

    A thread that goes on has 4 s to end. It has served once, because a thread that is only about to
    begin would stumble over its closed socket, and end.
    """

    def body(folder):
        threads = set(threading.enumerate())
        sink = impl.Prometheus(0)
        elsewhere = False
        with contextlib.suppress(OSError), socket.socket() as caller:
            caller.settimeout(2)
            caller.connect(("127.0.0.2", sink.port))  # reaches what listens on all addresses
            elsewhere = True
        busy = refusal(impl.Prometheus, sink.port)
        scraped(sink.port)
        sink.close()
        new, until = {*threading.enumerate()} - threads, time.monotonic() + 4
        for thread in new:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        left = [thread.name for thread in new if thread.is_alive()]
        again = refusal(lambda: impl.Prometheus(sink.port).close())
        wrong = [refusal(impl.Prometheus, port) for port in (70_000, -5)]
        impl.Prometheus(0, host="127.0.0.2").close()
        return elsewhere, sink.port, busy, again, left, wrong

    elsewhere, port, busy, again, left, wrong = alone(run, body)
    if elsewhere:
        fail("the endpoint listens on all addresses, not on 127.0.0.1 only", cause="exposed-port")
    if busy.startswith("!"):
        fail(f"a busy port {port}: expected a ValueError, but {busy[1:]}", cause="busy")
    expect_refusals(wrong, ["port 70000", "port -5"])
    expect_equal(again, "!it was accepted", what="the port after close()", cause="port-kept")
    expect_equal(left, [], what="threads left after close()", cause="thread-left")


# -- all of them -----------------------------------------------------------------------------------
@exercise("4.12", "gloo", asserts="one-rank-writes passed-on group one-broadcast cost output")
def test_one_rank_writes(impl, run):
    """Ranks 3, 1 and ranks 2, 0 in folders of their own: each step is once in the file, one event
    file, one rank that prints. After a resume, later steps are gone from all of them."""
    groups, ports = ([3, 1], [2, 0]), [free_port("127.0.0.2") for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        names, blocked = [Path(folder) / "odd", Path(folder) / "even"], Path(folder) / "file"
        blocked.touch()

        def body(ctx):
            made = [torch.distributed.new_group(ranks) for ranks in groups]
            which = 0 if ctx.rank in groups[0] else 1
            found = []
            for first, last in ((0, 4), (2, 3)):
                try:
                    sinks = impl.open_sinks(
                        names[which],
                        total_steps=3,
                        first_step=first,
                        port=ports[which],
                        host="127.0.0.2",
                        group=made[which],
                    )
                except ValueError as error:
                    return [str(error)]
                for step in range(first, last - which):
                    sinks.write(step, NUMBERS)
                if ctx.rank == min(groups[which]):
                    with contextlib.suppress(OSError):
                        address = "127.0.0.2", ports[which]
                        socket.create_connection(address, timeout=20).close()
                        found.append("served")
                sinks.close()
            bad = [blocked, names[1]][which]
            opened = lambda: impl.open_sinks(bad, total_steps=3, first_step=9, group=made[which])
            found.append(refusal(lambda: opened().close()).startswith("!"))
            return found

        results = run(body, 4)
        for rank, found in enumerate(results):
            if isinstance(error := next(iter(found), None), str) and error != "served":
                fail(
                    f"open_sinks raises ValueError on rank {rank}, though the folder is new and "
                    f"the port is free before: {error} (only one rank of a group opens them)",
                    cause="every-rank-writes",
                    rank=rank,
                )
        for group, name in zip(groups, names, strict=True):
            if not (name / "metrics.jsonl").exists():
                fail(
                    f"group {group} has no metrics.jsonl: the first rank of the *group* writes, "
                    f"here rank {min(group)}",
                    cause="nobody-writes",
                    rank=min(group),
                )
        steps = [[record["step"] for record in lines_of(n / "metrics.jsonl")] for n in names]
        events = [len([*name.glob("events*")]) for name in names]
        purged = [purges(name) for name in names]
    printed = [output.count("step ") for output in results.output]
    served = ["served"] * 2
    for what, got, want in (
        ("steps in the files", steps, [[0, 1, 2], [0, 1]]),
        ("event files, one of each run", events, [2, 3]),
        ("lines printed by each rank", printed, [3, 5, 0, 0]),
        (
            "endpoints on the host given, and whether a group can open its folder",
            [*results],
            [[*served, True], [*served, False], [True], [False]],
        ),
        ("steps from which TensorBoard hides older points", purged, [[0, 2], [0, 2, 9]]),
    ):
        expect_equal(got, want, what=what, cause="every-rank-writes")
    for rank, log in enumerate(results.logs):
        sizes = [event.payload for event in log.events]
        if len(sizes) != 3 or max(sizes) > 256:
            fail(
                f"messages of {sizes} bytes for three calls, expected one of 256 each",
                cause="too-many-bytes",
                rank=rank,
            )


def free_port(host: str) -> int:
    """A port on which no process listens now."""
    with socket.socket() as taken:
        taken.bind((host, 0))
        return int(taken.getsockname()[1])


def purges(folder: Path) -> list[int]:
    """The steps from which on a new event file hides what older ones have."""
    events = [e for path in folder.glob("events*") for e in EventFileLoader(str(path)).Load()]
    return sorted(event.step for event in events if event.HasField("session_log"))


@exercise("4.12", "gloo", asserts="refused-by-all what-was-open-is-closed alone refusals")
def test_busy_port_is_refused_by_all_ranks(impl, run):
    """Every rank raises the same error, whatever went wrong, and sinks
    that were open are closed."""
    with tempfile.TemporaryDirectory() as folder:
        free = free_port("127.0.0.1")

        def body(ctx):
            port = torch.zeros((), dtype=torch.int64)
            with socket.socket() as taken:
                if ctx.rank == 0:
                    taken.bind(("127.0.0.1", 0))
                    taken.listen()
                    port.fill_(taken.getsockname()[1])
                dist.broadcast(port, 0)
                found = [refusal(impl.open_sinks, folder, total_steps=3, port=port.item())]
            for error in (ImportError("no TensorBoard"), OSError(), RuntimeError("no")):
                with mock.patch("torch.utils.tensorboard.SummaryWriter", side_effect=error):
                    found.append(refusal(impl.open_sinks, folder, total_steps=3, port=free))
            impl.open_sinks(folder, total_steps=3, port=free).close()
            return found

        results = run(body, 3)
    reasons = ["a port is in use", "an ImportError", "an OSError without words", "an error"]
    for rank, texts in enumerate(results):
        for reason, text, first in zip(reasons, texts, results[0], strict=True):
            if text.startswith("!") or text != first:
                fail(
                    f"{reason}: expected the same ValueError on all ranks, rank {rank} got "
                    f"{text or 'one without words'}, rank 0 {first or 'one without words'}",
                    cause="not-agreed",
                    rank=rank,
                )


@exercise("4.12", "gloo", asserts="refused-by-all one-broadcast cost")
def test_long_sentences_arrive(impl, run):
    """The reason may be longer than the message, and end within a letter of several bytes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / ("x" * odd + "ü" * 120) for odd in (0, 1)]  # no folders
        for file in files:
            file.touch()

        def body(ctx):
            return [refusal(opened, file) for file in files]

        def opened(file):
            try:
                impl.open_sinks(file, total_steps=3)
            except UnicodeError as error:  # a ValueError, but no reason
                raise RuntimeError("a letter of the sentence was cut in two") from error

        results = run(body, 2)
    for rank, texts in enumerate(results):
        for text in texts:
            if text.startswith("!") or texts != results[0]:
                fail(
                    f"the folder is a file of a long name: expected the same ValueError on all "
                    f"ranks; rank {rank} got {text or 'none'}",
                    cause="not-agreed",
                    rank=rank,
                )
        sizes = [event.payload for event in results.logs[rank].events]
        if len(sizes) != 2 or max(sizes) > 256:
            fail(
                f"messages of {sizes} bytes for two calls, expected one of 256 each",
                cause="too-many-bytes",
                rank=rank,
            )


# -- the profiler's window -------------------------------------------------------------------------
@exercise("4.12", "gloo", asserts="window cut-off outside-free close-twice life output")
def test_profile_is_of_its_window(impl, run):
    """The trace has the steps of the window, both ends included, and no other; also if cut off."""

    def body(folder):
        def profiled(steps, first, last):
            path = folder / "traces" / f"{steps}-{first}-{last}" / "trace.json"
            window = impl.ProfileWindow(path, first, last)
            for step in steps:
                window.step(step)
                if (running := torch.autograd._profiler_enabled()) != (first <= step <= last):
                    said = "runs" if running else "does not run"
                    return (
                        f"it {said} in step {step}, of a window from {first} to {last} in a run of "
                        f"steps {steps[0]} to {steps[-1]}"
                    )
                with torch.profiler.record_function(f"step-{step}"):
                    torch.ones(10).sum()
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            window.close()
            if not path.exists():
                return None
            written = path.stat().st_mtime_ns
            window.close()
            if path.stat().st_mtime_ns != written:
                return "the trace is written twice"
            names = {str(e.get("name")) for e in json.loads(path.read_text())["traceEvents"]}
            return sorted(n for n in names if n.startswith("step-")), "aten::sum" in names

        deep = folder / "new" / "folders" / "trace.json"
        only = impl.ProfileWindow(deep, 0, 0)
        only.step(0)
        only.step(1)
        return [
            deep.exists(),
            profiled(range(6), 2, 3),
            profiled(range(3), 2, 5),
            profiled(range(3, 6), 2, 3),
            profiled(range(2), 2, 3),
        ]

    deep, inside, cut, resumed, never = alone(run, body)
    expect_equal(deep, True, what="a trace in new folders, of step 0", cause="window")
    for found in (inside, cut, resumed, never):
        if isinstance(found, str):
            fail(f"the profiler and its window: {found}", cause="window")
    expect_equal(inside, (["step-2", "step-3"], True), what="steps 2 to 3 of 6", cause="window")
    expect_equal(cut, (["step-2"], True), what="steps 2 to 5, ended after 2", cause="window")
    expect_equal(resumed, (["step-3"], True), what="2 to 3, resumed at 3", cause="window")
    expect_equal(never, None, what="a run that ends before its window: no trace", cause="window")


# -- what the numbers say --------------------------------------------------------------------------
def record(step: int, own: list[float], waits: list[float], **more: float) -> dict:
    """A record of exercise 4.11 with all its numbers: own and waiting times by rank."""
    mean = lambda values: sum(values) / len(values)
    seconds = max(o + w for o, w in zip(own, waits, strict=True))
    known = {
        "step": step,
        "loss": 1.5,
        "ranks": len(own),
        "samples_per_second": 640.0,
        "tokens_per_second": 6400.0,
        "mfu": None,
        "gpu_utilisation": None,
        "step_seconds": seconds,
        "data_seconds": 0.02,
        "forward_seconds": 0.3 * mean(own),
        "backward_seconds": 0.5 * mean(own),
        "optimizer_seconds": 0.1 * mean(own),
        "exposed_communication_seconds": mean(waits),
        "least_exposed_communication_seconds": min(waits),
        "hidden_communication_seconds": 3.0,
        "memory_share": 0.5,
        "stragglers": 0,
    }
    if more.get("stragglers"):
        slow = own.index(max(own))
        known |= {f"slow_rank{slow}": 2.0, f"slow_rank{slow}_since": 0}
    return known | {f"own_seconds_rank{r}": o for r, o in enumerate(own)} | more


EVEN, NO_WAIT = [1.0, 1.0, 1.0, 1.0], [0.0] * 4
SCENES = {
    "compute": ([record(s, EVEN, [0.05] * 4) for s in range(4)], {"communication": 0.05 / 1.05}),
    "data": ([record(s, EVEN, NO_WAIT, data_seconds=0.3) for s in range(4)], {"data": 0.3}),
    "communication": ([record(s, EVEN, [0.5] * 4) for s in range(4)], {"communication": 0.5 / 1.5}),
    "memory": ([record(s, EVEN, NO_WAIT, memory_share=0.95) for s in range(4)], {"memory": 0.95}),
    "straggler": (
        [record(s, [1, 1, 2, 1], [1.1, 1.1, 0.1, 1.1], stragglers=1) for s in range(4)],
        {"straggler": 1 / 2.1, "communication": 0.1 / 2.1, "data": 0.02 / 2.1, "memory": 0.5},
    ),
}
STRAGGLERS = {  # further runs in which a rank is slow, or only looks so
    "the last rank": ([1, 1, 1, 2], [1.1, 1.1, 1.1, 0.1], 1, "straggler"),
    "the first of two ranks": ([2, 1], [0.1, 1.1], 1, "straggler"),
    "uneven ranks, none found": ([1, 1, 2, 1], [1.1, 1.1, 0.1, 1.1], 0, "communication"),
}


@exercise("4.12", "virtual", asserts="shares bottleneck")
def test_bottleneck_is_named_with_its_share(impl, run):
    """Compute, data, communication, memory and a straggler, whose waiting counts once."""

    runs = [records for records, _ in SCENES.values()]
    uneven = [
        [record(s, own, waits, stragglers=found) for s in range(3)]
        for own, waits, found, _ in STRAGGLERS.values()
    ]
    uneven[1] = [dict(reversed([*each.items()])) for each in uneven[1]]

    def body(ctx):
        rest = [vars(impl.find_bottleneck(records)) for records in uneven]
        return [vars(impl.find_bottleneck(records)) for records in runs], rest

    found, rest = run(body, 1)[0]
    for (what, (own, waits, slow, want)), got in zip(STRAGGLERS.items(), rest, strict=True):
        expect_equal(got["kind"], want, what=f"the bottleneck, {what}", cause="bottleneck")
        seconds, mean = own[0] + waits[0], sum(own) / len(own)
        shares = {
            "straggler": slow / seconds,
            "data": 0.02 / seconds,
            "communication": (min(waits) if slow else sum(waits) / len(waits)) / seconds,
            "compute": 0.9 * mean / seconds,
            "memory": 0.5,
        }
        expect_equal({*got["shares"]}, {*shares}, what="names of the shares", cause="share")
        for name, share in shares.items():
            if abs(got["shares"][name] - share) > 1e-9:
                fail(
                    f"{what}: share of {name}: expected {share!r}, got {got['shares'][name]!r}",
                    cause="share",
                )
    for kind, got in zip(SCENES, found, strict=True):
        expect_equal(got["kind"], kind, what="the bottleneck", cause="bottleneck")
        for name, share in SCENES[kind][1].items():
            if abs(got["shares"][name] - share) > 1e-9:
                fail(
                    f"bottleneck {kind}: share of {name}: expected {share:.4f}, got "
                    f"{got['shares'][name]:.4f}",
                    cause="share",
                )


@exercise("4.12", "virtual", asserts="first-left-out bottleneck limits refused refusals")
def test_bottleneck_is_that_of_the_run(impl, run):
    """The first record warms up, a slow one in between is an exception; wasted time goes first."""
    slow = record(0, EVEN, NO_WAIT, data_seconds=60.0, step_seconds=70.0)
    usual = [record(s, EVEN, NO_WAIT) for s in range(1, 6)]
    full = [record(s, EVEN, [0.4] * 4, memory_share=0.99) for s in range(3)]
    both = [record(s, EVEN, [0.4] * 4, data_seconds=0.2) for s in range(3)]
    uneven = [record(s, [1, 1, 2, 1], [1.1, 1.1, 0.1, 1.1], stragglers=s % 2) for s in range(6)]
    exact = [record(s, EVEN, NO_WAIT, data_seconds=0.25) for s in range(3)]
    even_records = [record(1, EVEN, NO_WAIT, data_seconds=share) for share in (0.1, 0.3)]
    runs = {
        "a first record of 70 s": ([slow, usual[0]], "compute"),
        "one slow record of six": ([usual[0], slow, *usual[1:]], "compute"),
        "one record": ([slow], "data"),
        "communication, and full memory": (full, "communication"),
        "more communication than data": (both, "communication"),
        "a straggler in one of three records": ([uneven[k] for k in (1, 0, 2, 3)], "communication"),
        "a straggler, but in the last record": ([uneven[k] for k in (0, 1, 3, 2)], "straggler"),
    }

    every = [records for records, _ in runs.values()]

    def body(ctx):
        kinds = [impl.find_bottleneck(records).kind for records in every]
        strict = impl.find_bottleneck(both, waste=0.9).kind
        limits = [
            impl.find_bottleneck(exact, waste=waste, full=full).kind
            for waste, full in ((0.25, 0.5), (0.26, 0.5), (0.26, 0.51))
        ]
        nothing = refusal(impl.find_bottleneck, [])
        window = refusal(impl.ProfileWindow, "trace.json", 5, 4)
        even = impl.find_bottleneck([slow, *even_records]).shares["data"]
        return limits, kinds, strict, even, nothing, window

    limits, kinds, strict, even, *refused = run(body, 1)[0]
    expect_equal(
        limits,
        ["data", "memory", "compute"],
        what="a quarter of the time on data, half of the memory: with waste and full at these "
        "shares, waste above, both above",
        cause="limits",
    )
    for (what, (_, want)), got in zip(runs.items(), kinds, strict=True):
        expect_equal(got, want, what=what, cause="bottleneck")
    expect_equal(strict, "compute", what="with waste=0.9", cause="bottleneck")
    what = "share of data in two records with 0.1 and 0.3, after the first"
    expect_equal(round(even, 9), 0.2, what=what, cause="share")
    for what, text in zip(("no records", "an empty window"), refused, strict=True):
        if text.startswith("!"):
            fail(f"{what}: expected a ValueError, but {text[1:]}", cause="accepted")


@trace("4.12")
def scenario(impl):
    """The one broadcast by which all ranks learn that the first one's sinks are open."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            ctx.start_picture()
            impl.open_sinks(folder, total_steps=1, device=ctx.device).close()

    return body
