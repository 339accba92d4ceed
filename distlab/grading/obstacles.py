"""Obstacles to an exercise's checks: its file is deleted meanwhile, or can't be imported."""

from __future__ import annotations

import time
from pathlib import Path

from ..course.catalogue import Exercise
from ..ranks import RankContext, RankFailure
from . import runners
from .implementation import Implementation
from .runners import Place
from .sources import Source
from .verdicts import NotRun


def comes_back(path: Path) -> bool:
    """Whether the file is there, or comes back soon."""
    for _ in range(10):
        if path.is_file():
            return True
        time.sleep(0.02)
    return False


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
