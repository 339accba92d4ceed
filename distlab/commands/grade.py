"""The command behind ``python test_phaseN.py``: predictions first if the learner wants so."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from rich.console import Console

from ..course import progress
from ..grading.command import main as grade


def main(phase: int, argv: Sequence[str] | None = None) -> int:
    """Grade a learner's own work; the exit status."""
    return grade(phase, argv, first=_predicted)


def _predicted(ids: Sequence[str], out: Console) -> Callable[[], None] | None:
    """Ask for predictions, if `distlab predict --always on` was called; what to do afterwards."""
    if not progress.predicts_first():
        return None
    first = importlib.import_module("..labs.predict.first", __package__)  # start-up time
    after: Callable[[], None] = first.ask_first(ids, out)
    return after
