"""Predictions before the grading, for learners who want them: asked first, told after a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from ...course import progress
from ...host.terminal import say
from .. import frame
from .catalogue import SCENES
from .graded import graded
from .screen import HOW, asked_of, prompt, tell, title_of


def ask_first(ids: Sequence[str], out: Console) -> Callable[[], None]:
    """Ask for the prediction of each exercise that has one and was not predicted yet.

    Returns what to do after the grading.
    """
    waiting, done = progress.waiting_predictions(), frame.results()
    for exercise in ids:
        if exercise in SCENES and exercise not in waiting and f"P{exercise}" not in done:
            given = _ask(exercise, out)
            if given is not None:
                waiting[exercise] = given
                _save(waiting, out)
    return partial(_tell_passed, ids, out)


def _ask(exercise: str, out: Console) -> dict[str, Any] | None:
    scene, seed = SCENES[exercise], frame.seed_of_this_folder()
    say(out, title_of(scene, scene.case(seed), seed))
    say(out, f"Predict before it is graded. {HOW} Enter alone leaves it out this time.", "dim")
    numbers = {}
    for name, question, unit in asked_of(scene):
        number = prompt(question, unit, out, may_skip=True)
        if number is None:
            return None
        numbers[name] = number
    say(out, f"The run answers when exercise {exercise} passes.", "dim")
    return {"seed": seed, "numbers": numbers}


def _tell_passed(ids: Sequence[str], out: Console) -> None:
    """The outcome of what was predicted for exercises that pass now."""
    waiting = progress.waiting_predictions()
    for exercise in ids:
        if exercise in waiting and progress.entry(exercise).get("verdict") == "pass":
            scene, seed = SCENES[exercise], waiting[exercise]["seed"]
            say(out, "Your prediction, and the run:")
            say(out, title_of(scene, scene.case(seed), seed))
            try:
                outcomes = graded(scene, seed, waiting[exercise]["numbers"], "templates")
            except (ValueError, KeyError) as error:
                text = f"no outcome: {error}; `distlab predict {exercise}` asks again"
                say(out, text, "yellow")
            else:
                tell(outcomes, out, scene)
            del waiting[exercise]
            _save(waiting, out)


def _save(waiting: dict[str, dict[str, Any]], out: Console) -> None:
    for warning in progress.save_waiting_predictions(waiting):
        say(out, warning, "yellow")
