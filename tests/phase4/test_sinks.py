"""Checks of exercise 4.12: where the numbers go, on one rank, through kills and busy ports."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import tempfile
import urllib.request
from pathlib import Path

import torch
import torch._dynamo  # a profiler imports most of it: once here, not per rank
import torch.utils.tensorboard  # takes a second, too
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.grading.checks import refusal

NUMBERS = {"loss": 1.5, "samples_per_second": 640.0, "mfu": None}


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
@exercise("4.12", "gloo")
def test_each_line_is_on_its_way_when_it_is_written(impl, run):
    """A process that is killed after a write has lost nothing: the line is in the file already."""

    def body(folder):
        sink = impl.JsonLines(folder / "new" / "metrics.jsonl")
        sink.write(0, NUMBERS)
        sink.write(1, {"loss": float("nan"), "mfu": float("inf"), "ranks": 4})
        before = Path(sink.path).read_text()
        sink.close()
        return before, Path(sink.path).read_text()

    before, after = alone(run, body)
    if before != after:
        fail("a line waits in the process's buffer: a kill would lose it", cause="not-on-disk")
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        Path(file.name).write_text(after)
        want = [{"step": 0, **NUMBERS}, {"step": 1, "loss": None, "mfu": None, "ranks": 4}]
        expect_equal(lines_of(file.name), want, what="the file's records")


def content(path: Path) -> str:
    """All bytes of a file, each as one letter."""
    return path.read_bytes().decode("latin-1")


@exercise("4.12", "gloo")
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


@exercise("4.12", "gloo")
def test_full_disk_while_mending(impl, run):
    """What there was is still there if there is no room to write it anew."""

    def body(folder):
        path = folder / "metrics.jsonl"
        text = "".join(json.dumps({"step": s, "loss": 0.5}) + "\n" for s in range(2000))
        path.write_text(text + '{"step": 20')
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            impl.JsonLines(path, first_step=1990)
            done = True
        except OSError:
            done = False
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return done, len(path.read_text().splitlines())

    done, lines = alone(run, body)
    if lines < 1990:
        fail(f"of 2000 records {lines} are left, and no room for more", cause="lost-records")


@exercise("4.12", "gloo")
def test_what_can_not_be_read_is_passed_over(impl, run):
    """Torn lines in the middle, other JSON, bytes that are no text."""

    def body(folder):
        path = folder / "metrics.jsonl"
        path.write_bytes(b'{"step": 0}\n{"step": 1, "lo{"step": 2}\n7\n\xff\xfe\n\n{"step": 3}\n')
        return impl.read_json_lines(path)

    expect_equal(alone(run, body), [{"step": 0}, {"step": 3}], what="records", cause="unreadable")


# -- TensorBoard and Prometheus --------------------------------------------------------------------
@exercise("4.12", "gloo")
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
    expect_equal(alone(run, body), want, what="points of the curves", cause="curves")


def scraped(port: int) -> dict[str, str]:
    """What an endpoint serves, by name."""
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")


@exercise("4.12", "gloo")
def test_prometheus_scrapes_the_last_values(impl, run):
    """Two endpoints in one process, any free port, values set many times, NaN for not known."""

    def body(folder):
        first, second = impl.Prometheus(0), impl.Prometheus(0)
        first.write(1, NUMBERS)
        first.write(2, NUMBERS | {"loss": None, "mfu": 0.4})
        second.write(7, {"loss": 9.0})
        found = scraped(first.port), scraped(second.port)
        first.close()
        second.close()
        return found

    first, second = alone(run, body)
    want = {"training_step": 2.0, "training_samples_per_second": 640.0, "training_mfu": 0.4}
    for name, value in want.items():
        expect_equal(float(first.get(name, "-1")), value, what=name, cause="stale")
    if (served := first.get("training_loss")) != "NaN":
        fail(f"the loss is not known any more, but {served} is served", cause="stale")
    expect_equal(float(second["training_loss"]), 9.0, what="the second endpoint's loss")


@exercise("4.12", "gloo")
def test_endpoint_is_on_loopback_and_its_port_is_given_back(impl, run):
    """Nobody on the network reads it; a busy port is one sentence; a closed one is free."""

    def body(folder):
        sink = impl.Prometheus(0)
        elsewhere = False
        with contextlib.suppress(OSError), socket.socket() as caller:
            caller.settimeout(2)
            caller.connect(("127.0.0.2", sink.port))  # reaches what listens on all addresses
            elsewhere = True
        busy = refusal(impl.Prometheus, sink.port)
        sink.close()
        again = refusal(lambda: impl.Prometheus(sink.port).close())
        return elsewhere, sink.port, busy, again

    elsewhere, port, busy, again = alone(run, body)
    if elsewhere:
        fail("the endpoint listens on all addresses, not on 127.0.0.1 only", cause="exposed-port")
    if busy.startswith("!") or str(port) not in busy or "\n" in busy:
        fail(f"a busy port {port}: expected a ValueError that names it, got {busy}", cause="busy")
    expect_equal(again, "!it was accepted", what="the port after close()", cause="port-kept")


# -- all of them -----------------------------------------------------------------------------------
@exercise("4.12", "gloo")
def test_one_rank_writes(impl, run):
    """Three ranks: each step once in the file, one event file, one rank that prints."""
    with tempfile.TemporaryDirectory() as folder:

        def body(ctx):
            sinks = impl.open_sinks(folder, total_steps=3)
            for step in range(3):
                sinks.write(step, NUMBERS)
            sinks.close()
            torch.distributed.barrier()

        results = run(body, 3)
        steps = [record["step"] for record in lines_of(Path(folder) / "metrics.jsonl")]
        events = len([*Path(folder).glob("events*")])
    printed = [output.count("step ") for output in results.output]
    for what, got, want in (
        ("steps in the file", steps, [0, 1, 2]),
        ("event files", events, 1),
        ("lines printed by each rank", printed, [3, 0, 0]),
    ):
        expect_equal(got, want, what=what, cause="every-rank-writes")


@exercise("4.12", "gloo")
def test_busy_port_is_refused_by_all_ranks(impl, run):
    """Every rank raises the same sentence, and none waits for one that has gone."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def body(ctx):
            found = refusal(impl.open_sinks, folder, total_steps=3, port=port)
            free = impl.open_sinks(folder, total_steps=3, port=0)
            free.close()
            return found

        results = run(body, 3)
    for rank, text in enumerate(results):
        if text.startswith("!") or str(port) not in text or text != results[0]:
            fail(
                f"port {port} is in use: expected the same ValueError on all ranks, rank {rank} "
                f"got {text or 'none'}",
                cause="not-agreed",
                rank=rank,
            )


@exercise("4.12", "gloo")
def test_long_sentences_arrive(impl, run):
    """The reason may be longer than the message, and cut within a letter of several bytes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / ("x" * odd + "ü" * 120) for odd in (0, 1)]  # no folders
        for file in files:
            file.touch()

        def body(ctx):
            return [refusal(impl.open_sinks, file, total_steps=3) for file in files]

        results = run(body, 2)
    for rank, texts in enumerate(results):
        for text in texts:
            if text.startswith("!") or "ü" not in text or texts != results[0]:
                fail(
                    f"the folder is a file of a long name: expected the same ValueError on all "
                    f"ranks, its beginning at least; rank {rank} got {text or 'none'}",
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
@exercise("4.12", "gloo")
def test_profile_is_of_its_window(impl, run):
    """The trace has the steps of the window, both ends included, and no other; also if cut off."""

    def body(folder):
        def profiled(steps, first, last):
            path = folder / "traces" / f"{steps}-{first}-{last}" / "trace.json"
            window = impl.ProfileWindow(path, first, last)
            for step in steps:
                window.step(step)
                with torch.profiler.record_function(f"step-{step}"):
                    torch.ones(10).sum()
            window.close()
            if not path.exists():
                return None
            names = {str(e.get("name")) for e in json.loads(path.read_text())["traceEvents"]}
            return sorted(n for n in names if n.startswith("step-")), "aten::sum" in names

        return [
            profiled(range(6), 2, 3),
            profiled(range(3), 2, 5),
            profiled(range(3, 6), 2, 3),
            profiled(range(2), 2, 3),
        ]

    inside, cut, resumed, never = alone(run, body)
    expect_equal(inside, (["step-2", "step-3"], True), what="steps 2 to 3 of 6", cause="window")
    expect_equal(cut, (["step-2"], True), what="steps 2 to 5, ended after 2", cause="window")
    expect_equal(resumed, (["step-3"], True), what="2 to 3, resumed at 3", cause="window")
    expect_equal(never, None, what="a run that ends before its window: no trace", cause="window")


# -- what the numbers say --------------------------------------------------------------------------
def record(step: int, own: list[float], waits: list[float], **more: float) -> dict:
    """A record of exercise 4.11: own and waiting times by rank, 0.1 s of each step on data."""
    mean = lambda values: sum(values) / len(values)
    seconds = max(o + w for o, w in zip(own, waits, strict=True))
    known = {
        "step": step,
        "step_seconds": seconds,
        "data_seconds": 0.02,
        "forward_seconds": 0.3 * mean(own),
        "backward_seconds": 0.5 * mean(own),
        "optimizer_seconds": 0.1 * mean(own),
        "exposed_communication_seconds": mean(waits),
        "least_exposed_communication_seconds": min(waits),
        "memory_share": 0.5,
        "stragglers": 0,
    }
    return known | {f"own_seconds_rank{r}": o for r, o in enumerate(own)} | more


EVEN, NO_WAIT = [1.0, 1.0, 1.0, 1.0], [0.0] * 4
SCENES = {
    "compute": ([record(s, EVEN, [0.05] * 4) for s in range(4)], {"communication": 0.05 / 1.05}),
    "data": ([record(s, EVEN, NO_WAIT, data_seconds=0.3) for s in range(4)], {"data": 0.3}),
    "communication": ([record(s, EVEN, [0.5] * 4) for s in range(4)], {"communication": 0.5 / 1.5}),
    "memory": ([record(s, EVEN, NO_WAIT, memory_share=0.95) for s in range(4)], {"memory": 0.95}),
    "straggler": (
        [record(s, [1, 1, 2, 1], [1.1, 1.1, 0.1, 1.1], stragglers=1) for s in range(4)],
        {"straggler": 1 / 2.1, "communication": 0.1 / 2.1},
    ),
}


@exercise("4.12", "virtual")
def test_bottleneck_is_named_with_its_share(impl, run):
    """Compute, data, communication, memory and a straggler, whose waiting counts once."""

    runs = [records for records, _ in SCENES.values()]

    def body(ctx):
        return [vars(impl.find_bottleneck(records)) for records in runs]

    for kind, got in zip(SCENES, run(body, 1)[0], strict=True):
        expect_equal(got["kind"], kind, what="the bottleneck", cause="bottleneck")
        for name, share in SCENES[kind][1].items():
            if abs(got["shares"][name] - share) > 1e-9:
                fail(
                    f"bottleneck {kind}: share of {name}: expected {share:.4f}, got "
                    f"{got['shares'][name]:.4f}",
                    cause="share",
                )


@exercise("4.12", "virtual")
def test_bottleneck_is_that_of_the_run(impl, run):
    """The first record warms up, a slow one in between is an exception; wasted time goes first."""
    slow = record(0, EVEN, NO_WAIT, data_seconds=60.0, step_seconds=70.0)
    usual = [record(s, EVEN, NO_WAIT) for s in range(1, 6)]
    full = [record(s, EVEN, [0.4] * 4, memory_share=0.99) for s in range(3)]
    both = [record(s, EVEN, [0.4] * 4, data_seconds=0.2) for s in range(3)]
    runs = {
        "a first record of 70 s": ([slow, usual[0]], "compute"),
        "one slow record of six": ([usual[0], slow, *usual[1:]], "compute"),
        "one record": ([slow], "data"),
        "communication, and full memory": (full, "communication"),
        "more communication than data": (both, "communication"),
    }

    every = [records for records, _ in runs.values()]

    def body(ctx):
        kinds = [impl.find_bottleneck(records).kind for records in every]
        strict = impl.find_bottleneck(both, waste=0.9).kind
        nothing = refusal(impl.find_bottleneck, [])
        window = refusal(impl.ProfileWindow, "trace.json", 5, 4)
        return kinds, strict, nothing, window

    kinds, strict, *refused = run(body, 1)[0]
    for (what, (_, want)), got in zip(runs.items(), kinds, strict=True):
        expect_equal(got, want, what=what, cause="bottleneck")
    expect_equal(strict, "compute", what="with waste=0.9", cause="bottleneck")
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
