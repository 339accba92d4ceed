"""The scenario of an exercise: what ``distlab trace`` draws and ``distlab measure`` measures."""

from __future__ import annotations

import importlib
from typing import Any

from ..course import progress
from ..course.catalogue import Exercise, has_solutions
from ..host.terminal import short

RANKS = 4
LIMIT = 60.0  # seconds


def scenario_of(exercise: Exercise) -> Any:
    """The function marked ``@trace(id)`` in the exercise's check files."""
    for path in sorted(exercise.folder.glob(exercise.checks_glob)):
        name = path.relative_to(exercise.folder).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(name)
        for value in vars(module).values():
            if exercise.id in getattr(value, "trace_of", ()):
                return value
    raise ValueError(f"exercise {exercise.id} has no scenario to trace")


def run_scenario(exercise: Exercise, impl: str, scenario: Any, values: bool = False) -> Any:
    """The results of one run of the scenario on 4 ranks, by an implementation.

    ``values``: its events keep what was passed in. Exercises that it builds on and that don't pass
    yet are taken from the solutions. Raises ValueError with the learner's line if the run fails.
    """
    # start-up time: they import torch, and other commands need not wait for that
    from ..grading import implementation as under_test
    from ..grading import sources
    from ..ranks.results import RankFailure
    from ..ranks.run import run_ranks

    under_test.protect_this_process()
    source = sources.find_source(impl, exercise.phase)
    path = source.path(exercise.file)
    if sources.blank_lines(path, exercise.id):
        raise ValueError(f"exercise {exercise.id} is blank in {short(path)}: write it first")
    passes = set(progress.known_passes(exercise.phase.exercises)) | {exercise.id}
    others = [e for e in exercise.phase.exercises if e.id not in passes]
    replaced = others if impl == "templates" and has_solutions() else []
    body = scenario(under_test.Implementation(source, exercise.file, replaced))
    files = source.files()
    try:
        return run_ranks(body, RANKS, timeout=LIMIT, learner_files=files, values=values)
    except RankFailure as failure:
        where = f"\n  your line: {failure.line}" if failure.line else ""
        raise ValueError(f"the run of {exercise.id} failed: {failure.message}{where}") from None
