"""Obstacles to an exercise's checks: its file is absent, blank, broken or deleted."""

from __future__ import annotations

import time
from pathlib import Path

from ..course.catalogue import Exercise, places_of
from ..ranks import RankContext, RankFailure
from . import runners
from .implementation import Implementation, Source, blank_lines
from .runners import Place
from .verdicts import NotRun


def comes_back(path: Path) -> bool:
    """Whether the file is there, or comes back soon."""
    for _ in range(10):
        if path.is_file():
            return True
        time.sleep(0.02)
    return False


def in_the_file(source: Source, exercise: Exercise) -> NotRun | None:
    """Raise NotRun if the exercise's file can't be read, or if the
    exercise is still blank in it."""
    path = source.path(exercise.file)
    name = path.name
    if not path.is_file():
        return NotRun("error", f"{name} does not exist: `distlab reset {exercise.id}` makes it")
    try:
        left = blank_lines(path, exercise.id)
    except SyntaxError as error:
        text = (error.text or "").strip()
        line = f"{name}:{error.lineno}: {text}" if error.lineno else ""
        return NotRun("error", f"{name} is not valid Python: {error.msg}", line)
    except (OSError, ValueError) as error:
        return NotRun("error", f"{name} can't be read: {error}")
    except (RecursionError, MemoryError):
        return NotRun("error", f"{name} is nested too deeply for Python to read it")
    if source.name != "solutions" and path.resolve() == exercise.solution_path.resolve():
        message = f"{name} is a link to the solution: write it yourself"
        return NotRun("fail", message, cause="shortcut")
    if left and places_of(exercise) <= len(left):
        return NotRun("blank", f"still to be written, {name} line {left[0]}")
    return None


def at_import(
    source: Source, exercise: Exercise, impl: Implementation, place: Place
) -> NotRun | None:
    """Import the learner's file once, in a rank of its own, before any check needs it."""
    name = exercise.file

    def body(ctx: RankContext) -> None:
        impl.module(name)

    try:
        place.run_ranks(
            body,
            1,
            timeout=runners.RUN_LIMIT,
            process_group=False,
            ledger=False,
            learner_files=source.files(),
        )
    except RankFailure as failure:
        verdict = failure.kind if failure.kind in ("hang", "crash") else "error"
        verdict = "fail" if failure.cause == "shortcut" else verdict
        message = f"importing {source.path(exercise.file).name}: {failure.message}"
        told = verdict == "hang" or failure.cause in ("changed-default", "shortcut")
        return NotRun(verdict, message, failure.line, failure.cause if told else "")
    return None
