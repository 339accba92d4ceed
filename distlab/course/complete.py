"""Whether each exercise of the course has all its parts."""

from __future__ import annotations

import re

from .catalogue import Course, Exercise, check_files, functions_of
from .tracks import problems


def validate(course: Course, mutants: dict[str, int]) -> list[str]:
    """The missing parts: each line names the exercise and the part (empty: all complete).

    ``mutants``: number of wrong implementations per exercise.
    """
    found = []
    seen: set[str] = set()
    for exercise in course.exercises:
        found += [f"{exercise.id}: {text}" for text in _missing(exercise, seen)]
        if mutants.get(exercise.id, 0) < 2:
            found.append(f"{exercise.id}: fewer than two wrong implementations")
        seen.add(exercise.id)
    return found + problems(course.tracks, {e.id: e.builds_on for e in course.exercises})


def _missing(exercise: Exercise, earlier: set[str]) -> list[str]:
    found = []
    if exercise.id in earlier:
        found.append("the id is not unique")
    others = exercise.builds_on - earlier
    found += [f"builds on {other}, which does not come earlier" for other in sorted(others)]
    if exercise.points < 1:
        found.append("points must be positive")
    if exercise.minutes < 1 or exercise.difficulty not in range(1, 6):
        found.append("has no estimate: python -m scripts.workload --write")
    if len(exercise.hints) != 3 or not all(h.strip() for h in exercise.hints):
        found.append("needs three hints")
    if not exercise.solution_path.is_file():
        return [*found, "has no solution file"]
    try:
        if not functions_of(exercise):
            found.append("has no solution region inside a function")
    except ValueError as error:
        found.append(str(error))
    if not exercise.template_path.is_file():
        found.append("has no template")
    if not check_files(exercise):
        found.append("has no check")
    guidelines = exercise.guidelines_path
    text = guidelines.read_text(encoding="utf-8") if guidelines.is_file() else ""
    heading = rf"^## {re.escape(exercise.id)} [^\n]*\n"
    section = re.search(heading + r"(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not section or len(section[1].strip()) < 200:
        found.append("has no section in guidelines.md")
    return found
