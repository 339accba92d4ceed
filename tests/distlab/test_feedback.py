"""The benchmark of a learner's waits: what it measures, and the table of what it kept."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import grading
from benchmarks.machine import fingerprint
from distlab.course.catalogue import Phase, load_course, root

SIDE = {
    "phases": {"1": {"seconds": 11.6, "GB": 0.84}, "2": {"seconds": 25.2, "GB": 1.21}},
    "watch": {
        "1.1": {"first": 0.05, "verdict": 0.8},
        "1.2": {"first": 0.3, "verdict": 1.0},
        "1.3": {"first": 0.1, "verdict": 2.4},
    },
    "commands": {"a blank exercise": 0.31, "`distlab`": 0.2},
}


def test_medians_the_worst_and_the_most_memory_are_told() -> None:
    rows = grading.rows_of(SIDE)
    assert rows["phase 1, cold, s (goal 12)"] == "12"
    assert rows["memory of a phase's grading, GB (goal 1.5)"] == "1.2"
    assert rows["`watch`, save to first line, s (goal 0.2)"] == "0.10, worst 0.30 (1.2)"
    assert rows["`watch`, save to verdict, s (goal 1.0, worst 2.5)"] == "1.00, worst 2.40 (1.3)"
    assert rows["a blank exercise, s (goal 0.5)"] == "0.31"


def test_an_older_commit_has_its_column() -> None:
    known = {"machine": "one", "date": "2026-01-02", "now": SIDE}
    assert grading.table(known).header == ["what", "now"]
    older = {"commit": "abc", **SIDE, "watch": {"1.1": {"first": 1.4, "verdict": 1.5}}}
    found = grading.table({**known, "before": {**older, "commands": {}}})
    assert found.header == ["what", "before", "now"]
    rows = {what: [*told] for what, *told in found.rows}
    assert rows["phase 1, cold, s (goal 12)"] == ["12", "12"]
    assert rows["`distlab`, s (goal 0.3)"] == ["", "0.20"]
    all_of_them = rows["`watch`, save to verdict, s (goal 1.0, worst 2.5)"]
    assert all_of_them == ["1.50, worst 1.50 (1.1)", "1.00, worst 2.40 (1.3)"]
    same = rows["`watch`, save to verdict, s, the 1 exercises that both have"]
    assert same == ["1.50, worst 1.50 (1.1)", "0.80, worst 0.80 (1.1)"]
    assert "commit abc" in found.note


def test_a_measurement_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept before an interruption counts, unless the commit or the machine is another."""
    measured: list[object] = []

    def wait(name: str) -> Callable[..., object]:
        def call(folder: Path, *what: object) -> object:
            measured.append(what)
            if len(measured) == stop:
                raise KeyboardInterrupt
            return {"graded": {"seconds": 1.0, "GB": 0.5}, "started": 0.1}.get(name, saved)

        return call

    saved = {"first": 0.0, "verdict": 1.0}
    for name in ("graded", "started", "watched"):
        monkeypatch.setattr(grading, name, wait(name))
    monkeypatch.setattr(grading, "RECORD", tmp_path / "feedback.json")
    monkeypatch.setattr(grading, "solved_copy", lambda *_: contextlib.nullcontext(tmp_path))
    stop, count = 9, 3 + 4 + len(load_course().exercises)
    with pytest.raises(KeyboardInterrupt):
        grading.record()
    found = grading.record()
    assert len(measured) == count + 1
    assert len(found["now"]["watch"]) == len(load_course().exercises)
    grading.record()
    assert len(measured) == count + 1
    monkeypatch.setattr(grading, "fingerprint", lambda: {**fingerprint(), "cpu": "another"})
    found = grading.record()
    assert len(measured) == 2 * count + 1
    grading.RECORD.write_text(json.dumps({**found, "now": {**found["now"], "commit": "older"}}))
    grading.record()
    assert len(measured) == 3 * count + 1


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with grading.solved_copy(root(), load_course()) as folder:
        yield folder


def test_no_exercise_is_blank_in_the_copy(copy: Path) -> None:
    for exercise in load_course().exercises:
        file = copy / exercise.phase.folder / f"template_{exercise.file}.py"
        assert "raise NotImplementedError" not in file.read_text("utf-8")


@pytest.mark.parametrize("phase", load_course().phases, ids=lambda p: f"phase{p.number}")
def test_solutions_are_learners_files_in_the_copy(copy: Path, phase: Phase) -> None:
    modules = {f"{phase.folder}.template_{e.file}" for e in phase.exercises}
    code = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *sorted(modules)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_of_all_processes_counts_shared_pages_once(tmp_path: Path) -> None:
    taken = "x = bytearray(b'1') * 300_000_000; "
    alone = [sys.executable, "-c", f"import time; {taken}time.sleep(2)"]
    forked = [sys.executable, "-c", f"import os, time; {taken}os.fork(); time.sleep(2)"]
    one, both = (grading.run_watched(command, tmp_path) for command in (alone, forked))
    assert 0.29 < one < 0.35
    assert both < 1.2 * one
