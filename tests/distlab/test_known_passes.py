"""Passes that are remembered: an exercise that others build on is not graded at each save."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import forked_commands
import pytest

from benchmarks.grading import solved_copy
from distlab.course import progress
from distlab.course.catalogue import load_course, root
from distlab.grading.asked import _known
from distlab.grading.command import _parser

COURSE = load_course()


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A learner has passed these, and 3.12 before its code changed."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    found = {"1.1", "3.9", "3.10", "4.1", "4.6"}
    for each in found:
        now = progress.fingerprint(COURSE.exercise(each))
        progress.update(each, verdict="pass", points=1, fingerprint=now)
    progress.update("3.12", verdict="pass", points=1, fingerprint="before")
    return found


def asked(phase: int, *argv: str) -> argparse.Namespace:
    return _parser(COURSE.phase(phase)).parse_args(argv)


def test_passes_in_earlier_phases_are_known(passes: set[str]) -> None:
    """Those that are asked for are graded all the same."""
    phase = COURSE.phase(4)
    assert {*_known(phase, asked(4, "4.6"))} == {"3.9", "3.10", "4.1", "4.6"}
    assert {*_known(phase, asked(4))} == {"3.9", "3.10"}
    assert not _known(phase, asked(4, "4.6", "--impl", str(root())))


def test_what_passes_along_takes_no_time(passes: set[str]) -> None:
    progress.record([("4.6", "fail", 0)], along=[("1.2", "pass", 10)])
    progress.record([("4.6", "fail", 0)], along=[("1.3", "pass", 10)])
    for each in ("1.2", "1.3"):
        entry = progress.entry(each)
        assert (entry["verdict"], entry["points"]) == ("pass", 10)
        assert entry["fingerprint"] == progress.fingerprint(COURSE.exercise(each))
        assert "seconds" not in entry


def test_a_grading_remembers_what_it_graded_along() -> None:
    """Not if only some checks ran. A person's own options of pytest change nothing."""
    with solved_copy(root(), COURSE) as copy:

        def command(*arguments: str) -> None:
            environment = os.environ | {"PYTEST_ADDOPTS": "--no-such-option"}
            done = forked_commands.run([sys.executable, *arguments], cwd=copy, env=environment)
            assert done.returncode == 0, done.stdout + done.stderr

        def remembered() -> dict[str, str]:
            text = (copy / ".distlab" / "progress.json").read_text(encoding="utf-8")
            return {i: entry["verdict"] for i, entry in json.loads(text)["exercises"].items()}

        command("test_phase3.py", "3.10", "--tier", "virtual")
        assert not (copy / ".distlab" / "progress.json").exists()
        command("test_phase1.py", "1.5")
        along = COURSE.prerequisites(["1.5"])
        assert along
        assert remembered() == dict.fromkeys({"1.5", *along}, "pass")
