"""Exercises that are still blank get their verdict without torch, pytest or a check."""

from __future__ import annotations

import random

from ..course.catalogue import Exercise, Phase
from ..host.terminal import short
from .sources import Source, find_source, in_the_file
from .verdicts import ExerciseResult, Report


def blank_report(phase: Phase, impl: str, ids: list[str], seed: int | None) -> Report | None:
    """The report of a grading of exercises that are all blank; None if one of them is not."""
    source = find_source(impl, phase)
    chosen = [e for e in phase.exercises if e.id in ids or not ids]
    results = [_blank(source, exercise) for exercise in chosen]
    found = [result for result in results if result is not None]
    if len(found) < len(results):
        return None
    drawn = random.randrange(1, 1_000_000) if seed is None else seed
    return Report(phase.number, impl, drawn, "cpu", found)


def _blank(source: Source, exercise: Exercise) -> ExerciseResult | None:
    reason = in_the_file(source, exercise)
    if reason is None or reason.result.verdict != "blank":
        return None
    where = short(source.path(exercise.file))
    title, points = exercise.title, exercise.points
    return ExerciseResult(exercise.id, title, points, where, checks=[reason.result])
