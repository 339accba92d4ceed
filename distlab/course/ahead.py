"""What lies ahead of a learner: the next exercise and why, the minutes left, where to ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import progress
from .catalogue import Course, Exercise
from .tracks import Track

Entries = Mapping[str, Mapping[str, Any]]


def chosen_track(course: Course) -> Track:
    """The learner's track; all exercises if none was chosen, or if it is no track any more."""
    name = progress.track()
    every = Track("all", "All", "every exercise", tuple(e.id for e in course.exercises))
    return next((track for track in course.tracks if track.name == name), every)


def exercises_of(exercises: Sequence[Exercise], track: Track) -> list[Exercise]:
    """Those of a track that can be worked on, in order."""
    return [e for e in exercises if e.id in track.exercises and e.phase.ready]


def left(exercises: Sequence[Exercise], entries: Entries) -> list[Exercise]:
    """Those that do not pass; the first one is next."""
    return [e for e in exercises if entries.get(e.id, {}).get("verdict") != "pass"]


def why(exercise: Exercise, exercises: Sequence[Exercise]) -> str:
    """Why this exercise comes next: what of its track builds on it."""
    later = [e.id for e in exercises if exercise.id in e.builds_on]
    if not later:
        return "no later exercise builds on it"
    if len(later) == 1:
        return f"{later[0]} builds on it"
    shown = [*later[:3], f"{len(later) - 3} more"] if len(later) > 4 else later
    return f"{', '.join(shown[:-1])} and {shown[-1]} build on it"


def duration(minutes: float) -> str:
    """Minutes, or hours from two hours on."""
    if minutes < 120:
        return f"{minutes:.0f} minutes" if round(minutes) != 1 else "1 minute"
    return f"{round(minutes / 30) / 2:g} hours"


def where_to_ask(course: Course) -> str:
    """Who answers questions, as far as the course knows."""
    return (
        f"Ask at {course.address}."
        if course.address
        else "Ask the person who gave you this course."
    )
