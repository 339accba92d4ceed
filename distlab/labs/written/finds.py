"""What a learner's tests kill and the course's own checks do not: changes that count as harmless.

``labs/tests/survivors.toml`` has the changes of solutions that pass all checks, with the reason why
they break no promise (python -m scripts.lab_tests). A test that refuses one is a find: the reason
is wrong, or the test asks for more than the contract. A learner may bring a file of their own, too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...course.catalogue import Exercise, check_files, root
from ...grading.wrong import Mutant, patched
from .. import frame
from .jury import Jury, jury, test_name

SURVIVORS = "survivors.toml"
OWN = "your own file"
TRIED = 6  # changes in one grading


@dataclass(frozen=True)
class Find:
    """The change, the test that refuses it, and the cause that the grader tells."""

    mutant: Mutant
    test: str
    cause: str


def survivors(exercise: Exercise) -> list[Mutant]:
    """The changes that pass all checks. Those that only a GPU could tell are not among them."""
    path = root() / "labs" / "tests" / SURVIVORS
    entries = frame.read_toml(path).get(exercise.id, [])
    return [
        named(exercise, f"{e['function']}: {e['reason']}", e["text"], e["becomes"]) for e in entries
    ]


def drawn(changes: list[Mutant], seed: int) -> list[Mutant]:
    """Some of the changes, by the seed: each one takes as long as all tests."""
    return random.Random(seed).sample(changes, min(TRIED, len(changes)))


def named(exercise: Exercise, mistake: str, text: str, becomes: str) -> Mutant:
    """The change as a wrong implementation that no check kills yet."""
    digest = hashlib.sha256(f"{text}\0{becomes}".encode()).hexdigest()[:8]
    return Mutant(
        id=f"{exercise.file.replace('_', '-')}-found-{digest}",
        exercise=exercise.id,
        mistake=mistake,
        text=text,
        becomes=becomes,
        caught_by="",
        told_as="",
    )


def difference(before: str, after: str) -> tuple[str, str]:
    """The lines from the first to the last difference, before and after: the text before occurs
    once. ValueError if there is no difference."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if old == new:
        raise ValueError("it is the solution itself")
    begin = _equal(old, new)
    end = _equal(old[begin:][::-1], new[begin:][::-1])
    while True:
        text = "".join(old[begin : len(old) - end])
        if text and before.count(text) == 1:
            return text, "".join(new[begin : len(new) - end])
        begin, end = max(begin - 1, 0), max(end - 1, 0)


def _equal(first: list[str], second: list[str]) -> int:
    """How many lines at the beginning are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def brought(exercise: Exercise, file: Path) -> Mutant:
    """A learner's own implementation; ValueError with one line if it can't be used."""
    try:
        after = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} can't be read: {error}") from None
    solution = exercise.solution_path.read_text(encoding="utf-8")
    try:
        text, becomes = difference(solution, after)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    return named(exercise, OWN, text, becomes)


def found(by: Jury, changes: Iterable[Mutant], seed: int) -> Iterator[Find]:
    """Those of the changes that the tests refuse."""
    for mutant in changes:
        failed = by.judge(patched(mutant), seed)
        if failed is not None and failed.name:
            yield Find(mutant, test_name(failed), failed.cause)


def passes_ours(mutant: Mutant, exercise: Exercise, seed: int) -> bool:
    """Whether the course's own checks pass it."""
    with jury(exercise, check_files(exercise), course_own=True) as by:
        return by.judge(patched(mutant), seed) is None


def entry(exercise: Exercise, function: str, reason: str, after: str) -> dict[str, Any]:
    """The data of a change that leaves the solution as ``after``."""
    text, becomes = difference(exercise.solution_path.read_text(encoding="utf-8"), after)
    return {"function": function, "reason": reason, "text": text, "becomes": becomes}
