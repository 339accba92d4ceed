"""The table of systematic changes is complete, up to date, and explains every survivor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import Exercise, load_course
from distlab.grading.warm import WarmGrader
from scripts.mutate.changes import changes, fingerprint, solution_text
from scripts.mutate.grading import graded
from scripts.mutate.table import read

EXERCISES = [e for e in load_course().exercises if e.phase.ready]
SHARE = 0.5  # of the exercises: one of the killed changes is graded again


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_table_is_up_to_date(exercise: Exercise) -> None:
    entry = read(exercise).get(exercise.id)
    again = f"run: python -m scripts.mutate {exercise.id}"
    assert entry is not None, again
    assert entry.changes == fingerprint(exercise, solution_text(exercise)), again
    assert entry.unexplained == []


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


def drawn() -> list[Exercise]:
    """The exercises of the sample. A new exercise leaves the others' turns as they are."""
    return [e for e in EXERCISES if random.Random(e.id).random() < SHARE]


@pytest.mark.verdict
@pytest.mark.parametrize("exercise", drawn(), ids=lambda e: e.id)
def test_sample_is_killed(exercise: Exercise, tmp_path: Path, grader: WarmGrader) -> None:
    """A change that the table calls killed."""
    known = read(exercise)[exercise.id].survivors
    every = changes(exercise, solution_text(exercise))
    killed = [c for c in every if c.name not in known]
    change = random.Random(exercise.id).choice(killed)
    outcome = graded(grader, exercise, change, tmp_path)
    assert not outcome.survived, f"{exercise.id} {change.name}"
