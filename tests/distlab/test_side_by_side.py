"""Checks side by side: the report is the same as of one check at a time, whoever ends first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from distlab.course.catalogue import root
from distlab.grading import command as grader
from distlab.grading.session import Request
from distlab.grading.side_by_side import processors

FILE = "gradient_accumulation.py"
FIRST_LINE = "    losses: list[Tensor] = []\n"  # of a function of 2.1
KILLS = "    __import__('os').kill(__import__('os').getppid(), 9)\n"
TWICE = "    total /= 2\n"
HANGS = "    __import__('threading').Event().wait()\n"


def changed(folder: Path, line: str) -> Path:
    """The solutions of phase 2, with a line more in exercise 2.1."""
    shutil.copytree(root() / "solutions" / "phase2_advanced", folder)
    text = (folder / FILE).read_text()
    assert text.count(FIRST_LINE) == 1
    (folder / FILE).write_text(text.replace(FIRST_LINE, line + FIRST_LINE))
    return folder


def graded(folder: Path, jobs: int, *asked: str) -> list[dict[str, Any]]:
    """The exercises in the report's JSON, without what time makes different."""
    result = folder.parent / f"{jobs}.json"
    where = ["--impl", str(folder), "--device", "cpu", "--seed", "7"]
    grader.main(2, [*asked, *where, "--jobs", str(jobs), "--json", str(result)])
    exercises: list[dict[str, Any]] = json.loads(result.read_text())["exercises"]
    for exercise in exercises:
        del exercise["seconds"]
    return exercises


def test_the_report_is_that_of_one_check_at_a_time(tmp_path: Path) -> None:
    """2.1 is wrong, 2.9 and 2.21 are right, and 2.21 builds on 2.9."""
    folder = changed(tmp_path / "theirs", TWICE)
    asked = "2.1", "2.9", "2.21"
    assert graded(folder, 3, *asked) == graded(folder, 1, *asked)


def test_after_a_hang_no_check_counts(tmp_path: Path) -> None:
    """The hang takes seconds. Another check has passed by then, and doesn't count."""
    folder = changed(tmp_path / "theirs", HANGS)
    (side_by_side,) = graded(folder, 4, "2.1")
    verdicts = [check["verdict"] for check in side_by_side["checks"]]
    assert verdicts == ["hang", *["blocked"] * (len(verdicts) - 1)]
    assert side_by_side["verdict"] == "hang"


def test_a_rank_that_kills_its_parent_loses_its_own_check_only(tmp_path: Path) -> None:
    folder = changed(tmp_path / "theirs", KILLS)
    killed, other = graded(folder, 2, "2.1", "2.9")
    assert (killed["verdict"], other["verdict"]) == ("crash", "pass")
    assert "was ended by SIGKILL" in killed["checks"][0]["message"]


def test_junit_has_each_check_once(tmp_path: Path) -> None:
    folder, result = changed(tmp_path / "theirs", ""), tmp_path / "run.xml"
    where = ["--impl", str(folder), "--device", "cpu", "--junitxml", str(result)]
    assert grader.main(2, ["2.1", "2.9", *where, "--jobs", "2"]) == 0
    names = re.findall(r'<testcase [^>]*name="([^"]+)"', result.read_text())
    assert len(names) == len({*names}) > 6


def test_a_learner_sees_a_line_for_each_exercise_as_it_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(tmp_path / "theirs", TWICE)
    asked = ["2.1", "2.9", "--impl", str(folder), "--device", "cpu", "--jobs", "2"]
    assert grader.main(2, asked, watched=True) == 1
    lines = [line.split()[:2] for line in capfd.readouterr().out.splitlines() if line[:2] == "  "]
    assert lines.count(["2.1", "fail"]) == lines.count(["2.9", "pass"]) == 1


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_jobs_must_be_a_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        grader.main(2, ["2.1", "--jobs", text])
    assert caught.value.code == 2
    assert "--jobs" in capsys.readouterr().err


def test_graders_of_classes_run_one_check_at_a_time() -> None:
    """They grade several submissions at a time already."""
    assert Request().jobs == 1
    assert processors() >= 1
