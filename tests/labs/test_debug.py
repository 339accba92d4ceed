"""Debugging labs: each shows its bug, and mending it earns the points; bad answers are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlab.course import progress
from distlab.course.catalogue import root
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.labs import frame
from distlab.labs.debug import chosen, folder, graded, observed, sources

LABS = {lab.id: lab for lab in chosen.all_labs()}
TRIED = LABS["D1.02"]  # its run is the shortest
BUG = '[[bug]]\nranks = {}\nfile = "gradient_sync.py"\nline = {}\ncause = "{}"\n'


def passing(phase: int, request: Request) -> Report:
    """A grader that is content: what is tested is what a lab makes of its report."""
    checks = [CheckResult("test_it", "pass")]
    results = [ExerciseResult(each, "", 1, checks=checks) for each in request.exercises]
    return Report(phase, request.impl, 1, "cpu", results)


def failing(phase: int, request: Request) -> Report:
    report = passing(phase, request)
    report.exercises[0].checks = [CheckResult("test_it", "fail", "no mean", title="A mean")]
    return report


@pytest.mark.parametrize("lab_id", LABS)
def test_each_lab_fits_its_solution(lab_id: str) -> None:
    lab = LABS[lab_id]
    found = sources.sources_of(lab)
    assert len(found.places) == len(lab.causes) == len(lab.wrong)
    assert all(found.places)
    assert sources.changed_lines(found.wrong, found.right) > 0
    assert "# --- exercise" not in found.wrong
    assert lab.program_path.is_file()
    assert {mutant.exercise for mutant in lab.wrong} <= {
        e.id for e in lab.about.phase.exercises if e.file == lab.about.file
    }
    assert len(lab.offered) >= 12


@pytest.mark.parametrize("lab_id", ["D1.02", "D1.09", "D3.06", "D4.09"])
def test_the_bug_shows(lab_id: str) -> None:
    """The others: python -m scripts.try_labs."""
    assert folder.doubts(LABS[lab_id], seed=3) == ""


def test_a_bug_that_does_not_show_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "sources_of", lambda lab: sources.Sources("", "", ()))
    monkeypatch.setattr(folder, "observe", lambda *_: observed.Seen(failure="the same"))
    assert "nothing of it is seen" in folder.doubts(TRIED, seed=3)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return folder.write_lab(TRIED, 5, tmp_path / "lab")


def mend(made: Path) -> None:
    (made / TRIED.file).write_text(sources.sources_of(TRIED).right, encoding="utf-8")


def test_a_solved_lab_earns_all_and_half_of_it_less(made: Path) -> None:
    report = (made / folder.REPORT).read_text(encoding="utf-8")
    assert "second gradient" in report
    assert TRIED.exercise not in report
    assert TRIED.causes[0] not in report
    line = sources.sources_of(TRIED).places[0][0].first
    (made / folder.ANSWER).write_text(BUG.format("[1, 2]", line, TRIED.causes[0]))
    parts = graded.graded(made, passing)[2]
    assert [part.points for part in parts] == [3, 3, 0], "nothing was mended"
    mend(made)
    assert sum(part.points for part in graded.graded(made, passing)[2]) == TRIED.points
    assert [part.points for part in graded.graded(made, failing)[2]] == [3, 3, 0]
    text = (made / TRIED.file).read_text(encoding="utf-8")
    (made / TRIED.file).write_text(text + "\nA = 1\nB = 2\nC = 3\n", encoding="utf-8")
    mended = graded.graded(made, passing)[2][2]
    assert mended.points == 2, mended.text
    (made / folder.ANSWER).write_text(BUG.format('"all"', line + 40, "mode"))
    assert [part.points for part in graded.graded(made, passing)[2]][:2] == [0, 0]


BAD = {
    "cause": (BUG.format('"all"', 3, "one-rank-has"), "did you mean 'one-rank-has-it'?"),
    "line": (BUG.format('"all"', '"x"', "mode"), "line is a number from 1 to"),
    "ranks": (BUG.format("[7]", 3, "mode"), "a list of 0 to 2"),
    "field": (BUG.format('"all"', 3, "mode").replace("line", "lime"), "did you mean 'line'?"),
    "count": ("", "this lab has 1 [[bug]], and 0 are there"),
    "toml": ("[[bug]", "is no TOML"),
}


@pytest.mark.parametrize(("text", "told"), BAD.values(), ids=BAD)
def test_a_bad_answer_is_told(tmp_path: Path, text: str, told: str) -> None:
    mark = {"lab": TRIED.id, "seed": 5}
    (tmp_path / folder.MARK).write_text(json.dumps(mark))
    (tmp_path / folder.ANSWER).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="answer") as error:
        graded.graded(tmp_path, passing)
    assert told in str(error.value)


def test_a_folder_of_no_lab_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder of a lab"):
        graded.graded(tmp_path, passing)


def test_the_same_seed_deals_the_same_lab() -> None:
    labs = [*LABS.values()]
    twice = [[frame.dealt(seed, "lab", labs).id for seed in range(20)] for _ in range(2)]
    assert twice[0] == twice[1]
    assert len({*twice[0]}) > 5
    with pytest.raises(ValueError, match="there is no lab"):
        frame.dealt(1, "lab", [])


def test_progress_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "root", lambda: tmp_path)
    progress.update("1.1", hints=2)
    for points in (4, 9, 6):
        assert not frame.passed("D1.01", points, 10)
    assert frame.results() == {"D1.01": {"points": 9, "most": 10}}
    assert progress.hints_used("1.1") == 2
    with pytest.raises(ValueError, match="--spoil"):
        frame.need_release("1.4", "D1.01", False)


def test_programs_all_belong_to_labs() -> None:
    files = {path.stem for path in (root() / "labs" / "debug" / "programs").glob("*.py")}
    assert files == {lab.program for lab in LABS.values()}
