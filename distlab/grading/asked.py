"""A grading as the command line asks for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..course import progress
from ..course.catalogue import Phase, load_course
from ..sandbox import Limits
from .live import View
from .run import run_session
from .session import Request
from .side_by_side import processors
from .verdicts import Report


def graded(phase: Phase, options: argparse.Namespace, live: bool) -> Report:
    """Grade what ``options`` ask for. ``live``: with a line for each exercise that is graded."""
    request = _request(phase, options)
    if not live:
        return run_session(phase, request, options.keyword, options.junitxml or "")
    with View(options.exercises or [e.id for e in phase.exercises]) as view:
        return run_session(phase, request, options.keyword, options.junitxml or "", view)


def _request(phase: Phase, options: argparse.Namespace) -> Request:
    return Request(
        impl=options.impl,
        device=options.device,
        seed=options.seed,
        exercises=tuple(options.exercises),
        known=frozenset(_known(phase, options)),
        partial=options.partial,
        tier=options.tier,
        jobs=options.jobs or processors(),
        sandbox=Limits() if options.sandbox else None,
    )


def _known(phase: Phase, options: argparse.Namespace) -> Iterable[str]:
    """The exercises that count as passed without being graded again."""
    course, asked = load_course(), set(options.exercises)
    own = {e.id for e in phase.exercises}
    if options.impl == "solutions" and asked:  # their code is used, whether it passes or not
        return {e.id for e in course.exercises} - asked
    if options.impl != "templates":
        return ()
    built_on = course.prerequisites(asked or own)  # also in earlier phases
    wanted = built_on | own if asked else built_on - own
    return progress.known_passes(map(course.exercise, wanted))
