"""Correct implementations written differently pass: checks ask for the contract, not a style."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import load_course
from distlab.course.templates import template_of
from distlab.grading.session import Request
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import beside_solutions

HERE = Path(__file__).parent
CASES = sorted(
    (
        (path.parent, exercise)
        for path in HERE.glob("*/*.py")
        for exercise in path.read_text().splitlines()[0].partition("for: ")[2].split(", ")
    ),
    key=lambda case: (int(case[1].split(".")[0]), case),  # phase by phase
)

EXERCISES = load_course().exercises
FIRST = {exercise: (folder, exercise) for folder, exercise in reversed(CASES)}


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    """The alternatives of a phase are graded one after the other: its checks stay collected."""
    with WarmGrader() as warm:
        yield warm


@pytest.mark.verdict
@pytest.mark.parametrize(("folder", "exercise"), CASES, ids=lambda v: getattr(v, "name", v))
def test_alternative_passes(
    folder: Path, exercise: str, tmp_path: Path, grader: WarmGrader
) -> None:
    """The first of an exercise on all tiers, others on each check's first one: time is short."""
    chosen = load_course().exercise(exercise)
    further = (folder, exercise) != FIRST[exercise]
    request = beside_solutions(folder, chosen, tmp_path, guarded=False, once=further)
    report = grader.grade(chosen.phase.number, request)
    (result,) = report.exercises
    failures = [(c.name, c.message) for c in result.checks if c.verdict != "pass"]
    names = [c.name.partition("[virtual")[0].partition("[gloo")[0] for c in result.checks]
    assert not further or len(names) == len({*names}), "each check runs once"
    assert result.verdict == "pass", f"--seed {report.seed}: {failures}"


@pytest.mark.verdict
@pytest.mark.parametrize("exercise", [e.id for e in EXERCISES if e.phase.ready])
def test_solution_passes_as_the_learners_text(
    exercise: str, tmp_path: Path, grader: WarmGrader
) -> None:
    """Written into a blank template by a learner who has solved only what must come before: the
    checks watch for shortcuts then, and solutions stand in for all other exercises."""
    course = load_course()
    chosen = course.exercise(exercise)
    written = {e.file for e in (chosen, *map(course.exercise, chosen.requires))}
    for other in chosen.phase.exercises:
        own = other.file in written
        text = other.solution_path.read_text(encoding="utf-8") if own else template_of(other)
        (tmp_path / f"template_{other.file}.py").write_text(text, encoding="utf-8")
    request = Request(
        impl=str(tmp_path),
        device="cpu",
        exercises=(exercise,),
        known=frozenset(chosen.requires),
        once=True,
    )
    report = grader.grade(chosen.phase.number, request)
    failures = [(c.name, c.message) for c in report.exercises[0].checks if c.verdict != "pass"]
    assert report.exercises[0].verdict == "pass", f"--seed {report.seed}: {failures}"


def test_every_exercise_has_two() -> None:
    counts = Counter(exercise for _, exercise in CASES)
    missing = [e.id for e in EXERCISES if e.phase.ready and counts[e.id] < 2]
    assert not missing, f"tests/alternatives has fewer than two for {missing}"
