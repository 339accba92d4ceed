"""Debugging labs: what an answer and a mended program earn, and what bad ones are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.grading.warm import WarmGrader
from distlab.labs import frame
from distlab.labs.debug import command, folder, graded, observed
from tests.labs.debugging import SOURCES, TRIED, ask
from tests.labs.debugging import grader as grader
from tests.labs.debugging import learner as learner
from tests.labs.debugging import made as made
from tests.labs.debugging import once as once

BUG = '[[bug]]\nranks = {}\nfile = "gradient_sync.py"\nline = {}\ncause = "{}"\n'
OTHER = next(name for name in TRIED.offered if name not in TRIED.causes)
FIRST_LINE = "    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]\n"


def passing(phase: int, request: Request) -> Report:
    """A grader that is content: what is tested is what a lab makes of its report."""
    checks = [CheckResult("test_it", "pass")]
    results = [ExerciseResult(each, "", 1, checks=checks) for each in request.exercises]
    return Report(phase, request.impl, 1, "cpu", results)


def failing(phase: int, request: Request) -> Report:
    report = passing(phase, request)
    report.exercises[0].checks = [CheckResult("test_it", "fail", "no mean", title="A mean")]
    return report


def without_checks(phase: int, request: Request) -> Report:
    return Report(phase, request.impl, 1, "cpu", [], notes=["the checks are broken"])


# -- answers ---------------------------------------------------------------------------------------
def test_a_solved_lab_earns_all_and_half_of_it_less(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = (made / folder.REPORT).read_text(encoding="utf-8")
    assert "second gradient" in report
    line = SOURCES.spots[0][0].first
    (made / folder.ANSWER).write_text(BUG.format("[1, 2]", line, TRIED.causes[0]))

    def points(grade: graded.Grader = passing) -> list[float]:
        return [part.points for part in graded.graded(made, grade)[2]]

    assert points() == [3, 3, 0], "nothing was mended"
    (made / TRIED.file).write_text("# a remark\n" + SOURCES.wrong, encoding="utf-8")
    assert points() == [3, 3, 0], "a comment mends nothing"
    (made / TRIED.file).write_text(SOURCES.right, encoding="utf-8")
    assert sum(points()) == TRIED.points
    assert points(failing) == [3, 3, 0]
    assert points(without_checks) == [3, 3, 0]
    (made / TRIED.file).write_text(SOURCES.right + "\nA = 1\nB = 2\nC = 3\n", encoding="utf-8")
    assert points() == [3, 3, 2], "more lines than needed"
    (made / folder.ANSWER).write_text(BUG.format('"all"', line + 40, OTHER))
    assert points()[:2] == [0, 0]


def test_the_result_is_told_written_and_remembered(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "graded", lambda path: graded.graded(path, passing))
    (made / folder.ANSWER).write_text(BUG.format('"all"', 3, TRIED.causes[0]))
    assert ask("--grade lab --json result.json") == 1
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["lab"], result["points"], result["most"]) == ("D1.02", 3, 10)
    assert result["kind"] == "debug"
    assert result["seed"] == 5
    assert [part["name"] for part in result["parts"]] == ["place", "cause", "mended"]
    assert "lab D1.02: 3 of 10 points" in capsys.readouterr().out
    frame.passed("D1.02", 1, 10)
    assert frame.results()["D1.02"] == {"points": 3, "most": 10}, "the best counts"


BAD = {
    "form": ("", "this lab has 1 [[bug]], and 0 are there"),
    "cause": (BUG.format('"all"', 3, "one-rank-has"), "did you mean 'one-rank-has-it'?"),
    "line": (BUG.format('"all"', '"x"', OTHER), "line is a number from 1 to"),
    "ranks": (BUG.format("[7]", 3, OTHER), "a list of 0 to 2"),
    "field": (BUG.format('"all"', 3, OTHER).replace("line", "lime"), "did you mean 'line'?"),
    "file": (BUG.format('"all"', 3, OTHER).replace("t_sync", "t"), "file is 'gradient_sync.py'"),
    "extra": ("bugs = 1\n" + BUG.format('"all"', 3, OTHER), "unknown field 'bugs'"),
    "no table": ("bug = 3", "begins with [[bug]]"),
    "toml": ("[[bug]", "is no TOML"),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_bad_answer_is_told(made: Path, text: str, told: str) -> None:
    (made / folder.ANSWER).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="answer") as error:
        ask("--grade lab")
    assert told in str(error.value)
    assert (made / folder.ANSWER).read_text(encoding="utf-8") == text
    assert frame.results() == {}, "nothing was graded"


def test_a_missing_answer_or_file_is_told(made: Path) -> None:
    (made / TRIED.file).unlink()
    (made / folder.ANSWER).write_text(BUG.format('"all"', 3, OTHER))
    for line in ("--grade lab", "--again lab"):
        with pytest.raises(ValueError, match=re.escape("gradient_sync.py can't be read")):
            ask(line)
    (made / folder.ANSWER).unlink()
    with pytest.raises(ValueError, match=re.escape("answer.toml can't be read")):
        ask("--grade lab")
    (made / folder.MARK).write_text('{"lab": "D0.00", "seed": 1}')
    with pytest.raises(ValueError, match="make the lab again"):
        ask("--grade lab")


# -- bad programs ----------------------------------------------------------------------------------
def first(line: str) -> str:
    assert FIRST_LINE in SOURCES.right
    return SOURCES.right.replace(FIRST_LINE, f"    {line}\n{FIRST_LINE}")


COPIES = "from solutions.phase1_data_parallel.trainer import average_gradients as own"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SOURCES.right + "\ndef (:\n", "gradient_sync.py is not valid Python"),
        (SOURCES.right + "\nimport nothing_like_it\n", "importing gradient_sync.py"),
        (first(COPIES), "imports solutions.phase1_data_parallel.trainer: write it yourself"),
    ],
    ids=["syntax", "import", "answers"],
)
def test_a_bad_program_is_told_by_its_grading(text: str, told: str, grader: WarmGrader) -> None:
    (said,) = graded.failures(TRIED, text, grader.grade)
    assert told in said


@pytest.mark.parametrize("line", ["while True: pass", "while True: print('x' * 999)"])
def test_a_program_without_an_end_is_ended(
    made: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observed, "LIMIT", 1.0)
    (made / TRIED.file).write_text(first(line), encoding="utf-8")
    assert ask("--again lab --ranks 1") == 1
    assert "in a loop that does not end" in capsys.readouterr().out
    assert (made / TRIED.file).read_text(encoding="utf-8") == first(line)


def test_the_program_runs_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--again lab") == 1
    assert "not as expected on ranks 1, 2" in capsys.readouterr().out
    (made / TRIED.file).write_text(SOURCES.right, encoding="utf-8")
    assert ask("--again lab --ranks 2") == 0
    assert "all is as expected" in capsys.readouterr().out
    report = (made / folder.AGAIN / folder.REPORT).read_text(encoding="utf-8")
    assert report.startswith("# Lab D1.02 again, on 2 ranks")
