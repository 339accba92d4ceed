"""What tests earn in the labs: a naive one, the course's own checks, and an empty one."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlab.course.catalogue import Exercise, check_files, root
from distlab.grading.wrong import patched
from distlab.labs.written.command import Wrong, grade
from distlab.labs.written.finds import drawn, found, survivors
from distlab.labs.written.jury import alternatives, jury

PATH = root() / "tests" / "labs" / "measured.toml"
ABOUT = (
    "What tests earn of each lab, as a share of its points: naive ones (naive/, values on two",
    "ranks), the course's own checks, and an empty one. seconds: of the processor, for grading the",
    "course's own checks in the learner's stead, the longest tests there are. digest: of all that",
    "these numbers depend on. Written by python -m scripts.lab_tests",
)
EMPTY = "def test_nothing(impl, run):\n    pass\n"


def naive(exercise: Exercise) -> Path:
    """The naive test of the exercise."""
    return PATH.parent / "naive" / f"tests_for_{exercise.id.replace('.', '_')}.py"


def digest(exercise: Exercise, wrong: Sequence[Wrong]) -> str:
    """A hash of the exercise's right and wrong implementations and of the tests."""
    hashed = hashlib.sha256()
    for each in wrong:
        hashed.update(f"{each.axis} {each.checks} {patched(each.mutant)}".encode())
    others = (each.folder / f"{exercise.file}.py" for each in alternatives(exercise))
    for path in (exercise.solution_path, naive(exercise), *check_files(exercise), *others):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def share(exercise: Exercise, file: Path, wrong: Sequence[Wrong], seed: int) -> float:
    """What a file of tests earns."""
    with jury(exercise, [file]) as by:
        outcome = grade(by, wrong, seed)
    assert not outcome.refused, outcome.refused
    return round(outcome.share, 3)


def _spent() -> float:
    """Seconds of the processor, with those of ended children."""
    return sum(os.times()[:4])


def row(exercise: Exercise, wrong: Sequence[Wrong], seed: int) -> dict[str, Any]:
    """The entry of an exercise."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "tests_empty.py"
        empty.write_text(EMPTY, encoding="utf-8")
        nothing = share(exercise, empty, wrong, seed)
    little = share(exercise, naive(exercise), wrong, seed)
    began = _spent()
    with jury(exercise, check_files(exercise), course_own=True) as by:
        outcome = grade(by, wrong, seed)
        finds = [find.mutant.mistake for find in found(by, drawn(survivors(exercise), seed), seed)]
    seconds = _spent() - began
    assert not outcome.refused, outcome.refused
    assert not finds, finds
    return {
        "digest": digest(exercise, wrong),
        "wrong": len(wrong),
        "naive": little,
        "own": round(outcome.share, 3),
        "empty": nothing,
        "seconds": round(seconds),
    }
