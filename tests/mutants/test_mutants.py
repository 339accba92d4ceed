"""Every wrong implementation is killed by its named check, with its named diagnosis."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import load_course
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import Mutant, all_mutants, run_mutant

MUTANTS = all_mutants()


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    """Wrong implementations of a file are graded one after the other: its checks stay collected."""
    with WarmGrader() as warm:
        yield warm


@pytest.mark.verdict
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.id)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path, grader: WarmGrader) -> None:
    result = run_mutant(mutant, tmp_path, grade=grader.grade)
    assert result is not None, f"there is no check {mutant.caught_by}"
    assert result.verdict != "pass", f"{mutant.id} survives {mutant.caught_by}: {mutant.mistake}"
    assert result.cause in mutant.causes, f"{result.verdict}: {result.message}"
    assert result.message


# mistakes that real backends forgive most of the time; virtual ranks never do
STRICT = {
    "direct-send-first-ring": "hang",
    "direct-send-buffer-reused": "overwritten-in-flight",
    "direct-sends-waited-only": "never-waited",
    "chain-unmatched-send": "hang",
    "print-barrier-of-rank-0": "hang",
    "ring-send-first": "hang",
    "segments-too-many-at-once": "overwritten-in-flight",
}


@pytest.mark.verdict
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.id in STRICT], ids=lambda m: m.id)
def test_virtual_ranks_kill_it_and_name_rank_and_line(
    mutant: Mutant, tmp_path: Path, grader: WarmGrader
) -> None:
    result = run_mutant(mutant, tmp_path, grade=grader.grade)
    assert result is not None
    assert (result.tier, result.cause) == ("virtual", STRICT[mutant.id])
    assert result.rank is not None
    course = load_course()
    exercise = course.exercise(mutant.exercise)
    files = {e.file for e in (exercise, *map(course.exercise, exercise.uses))}
    assert result.line.partition(".py:")[0] in files
    assert "no result after" not in result.message  # no time-out was waited for


@pytest.mark.verdict
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.tier], ids=lambda m: m.id)
def test_other_virtual_ranks_forgive_it(mutant: Mutant, tmp_path: Path, grader: WarmGrader) -> None:
    """Not on gloo: what a buffer holds before the wait depends there on who is faster."""
    elsewhere = dataclasses.replace(mutant, tier="virtual")
    result = run_mutant(elsewhere, tmp_path, grade=grader.grade)
    assert result is not None
    assert result.verdict == "pass", result.message


def test_ids_are_unique() -> None:
    assert {m.id for m in MUTANTS} >= {*STRICT}
    assert not [i for i, count in Counter(m.id for m in MUTANTS).items() if count > 1]


def test_enough_of_them() -> None:
    per_phase = Counter(load_course().exercise(m.exercise).phase.number for m in MUTANTS)
    assert per_phase[1] >= 40
    assert per_phase[2] >= 60
    assert per_phase[3] >= 80
