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
    mine = options.impl == "templates"
    known: Iterable[str] = progress.known_passes(phase) if mine and options.exercises else ()
    if options.impl == "solutions":  # the learner's own code is used, whether it passes or not
        known = {e.id for e in load_course().exercises} - set(options.exercises)
        known = known if options.exercises else ()
    return Request(
        impl=options.impl,
        device=options.device,
        seed=options.seed,
        exercises=tuple(options.exercises),
        known=frozenset(known),
        partial=options.partial,
        tier=options.tier,
        jobs=options.jobs or processors(),
        sandbox=Limits() if options.sandbox else None,
    )
