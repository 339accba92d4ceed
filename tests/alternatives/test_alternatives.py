"""Correct implementations written differently pass: checks ask for the contract, not a style."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import load_course
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


def test_every_exercise_has_two() -> None:
    counts = Counter(exercise for _, exercise in CASES)
    missing = [e.id for e in load_course().exercises if e.phase.ready and counts[e.id] < 2]
    assert not missing, f"tests/alternatives has fewer than two for {missing}"
