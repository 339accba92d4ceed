"""Profiles of own runs: they are written, read, and refused in one line."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distlab.course.catalogue import root
from given.profile_files import Span, Trace, snapshot_entries
from given.profiled import WARMUP, profiled
from solutions.phase4_production import profile_reading
from tests import forked_commands


def slow_run(reason: str, ranks: int, folder: Path) -> Trace:
    """The profile of the last rank of a run of three steps."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", "-m", "given.slow_run", "7", "--reason", reason, "--steps", "3"]
    done = forked_commands.run([*command, "--out", str(folder)], cwd=root(), timeout=300)
    assert done.returncode == 0, done.stderr
    return profile_reading.read_trace(folder / f"rank{ranks - 1}" / "trace.json.gz")


def test_a_run_that_grows_keeps_as_many_bytes_in_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = slow_run("memory", 1, tmp_path)
    for kind in ("step", "data", "optimizer", "communication"):
        assert len(trace.of(kind)) == 3, kind
    assert profile_reading.growth(trace, trace.changes)[0] in (1 << 20, 2 << 20, 3 << 20)
    found = profile_reading.bottleneck(trace)
    assert found.part == "memory"
    path = str(tmp_path / "rank0" / "trace.json.gz")
    monkeypatch.setattr(sys, "argv", ["profile_reading", path])
    assert profile_reading.main() == 0
    printed = capsys.readouterr().out
    assert str(found) in printed
    assert [line.split()[0] for line in printed.splitlines()][:6] == list(profile_reading.PARTS)


def test_an_exposed_all_gather_is_done_before_forward_begins(tmp_path: Path) -> None:
    trace = slow_run("communication", 2, tmp_path)
    gathers = trace.of("communication")
    assert len(gathers) == 3
    for gather, step in zip(gathers, trace.of("step"), strict=True):
        linear = [s for s in trace.of("compute") if s.name == "aten::linear"]
        first = min(s.begin for s in linear if s.begin >= step.begin)
        assert step.begin <= gather.begin <= gather.end <= first


def test_a_file_that_is_no_trace_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_text("[]")
    for name in ("trace.json", "missing.json"):
        monkeypatch.setattr(sys, "argv", ["profile_reading", str(tmp_path / name)])
        assert profile_reading.main() == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line


def test_a_snapshot_runs_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'harmed'}",)

    (tmp_path / "memory.pickle").write_bytes(pickle.dumps({"device_traces": [Harmful()]}))
    with pytest.raises(ValueError, match="plain data names nothing"):
        snapshot_entries(tmp_path / "memory.pickle")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_too_few_steps_are_told(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=rf"^1 steps were made, .* needs {WARMUP} \+ 4$"),
        profiled(tmp_path / "new") as profiler,
    ):
        profiler.step()


def test_a_gpu_gives_a_snapshot_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **k: calls.append(k))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    with profiled(tmp_path, steps=1) as profiler:
        for _ in range(WARMUP + 1):
            profiler.step()
    assert calls == [{"stacks": "python"}, "memory.pickle", {"enabled": None}]
    assert profile_reading.read_trace(tmp_path / "trace.json.gz").of("step") != []


def test_the_window_is_that_of_the_steps() -> None:
    spans = [Span("step", "s", (1, 1), a, b, a) for a, b in ((30, 50), (10, 60))]
    assert Trace(tuple(spans)).window == (10, 60)
