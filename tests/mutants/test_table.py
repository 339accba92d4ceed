"""The table of systematic changes is complete, up to date, and explains every survivor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import Exercise, load_course
from distlab.grading.warm import WarmGrader
from scripts.mutate.changes import Change, changes, fingerprint, solution_text
from scripts.mutate.grading import graded
from scripts.mutate.table import read

EXERCISES = [e for e in load_course().exercises if e.phase.ready]
SAMPLE = 40  # of the killed ones


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


@pytest.fixture(scope="module")
def sample() -> list[tuple[Exercise, Change]]:
    """Changes that the table calls killed, phase by phase."""
    chance = random.Random(SAMPLE)
    drawn = sorted(chance.choices(EXERCISES, k=SAMPLE), key=lambda e: (e.phase.number, e.file))
    found = []
    for exercise in drawn:
        known = read(exercise)[exercise.id].survivors
        every = [c for c in changes(exercise, solution_text(exercise)) if c.name not in known]
        found.append((exercise, chance.choice(every)))
    return found


@pytest.mark.parametrize("number", range(SAMPLE))
def test_sample_is_killed(
    number: int, sample: list[tuple[Exercise, Change]], tmp_path: Path, grader: WarmGrader
) -> None:
    exercise, change = sample[number]
    outcome = graded(grader, exercise, change, tmp_path)
    assert not outcome.survived, f"{exercise.id} {change.name}"
