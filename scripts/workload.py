"""Estimate the work in exercises: ``python -m scripts.workload`` prints tables for teachers.

They stand in docs/instructors.md. An exercise has 10 minutes to begin, 1 minute for every 130 words
of its section of the guidelines, and 3 minutes for each line to write. These lines are those of the
solution's regions without comments and blank lines. Nobody has measured this with a class: it is a
rule to plan with.
"""

from __future__ import annotations

import math
import re

from distlab.course.catalogue import Course, Exercise, Phase, load_course
from distlab.course.regions import regions_of

BEGIN, WORDS, LINE = 10, 130, 3
# what is done in which week, if a term has 14; the last item is shown in class
TERM = (
    "1.1 1.2",
    "1.3 1.4",
    "1.5 1.6",
    "1.7 1.8",
    "2.1 2.2 2.3 2.5",
    "2.7 2.8",
    "2.9 2.10 2.11",
    "2.14 2.15 2.16 2.17",
    "3.1 3.2 3.3 3.7 3.8",
    "3.9 3.10 3.12",
    "3.13 3.14",
    "3.15 3.16 3.25",
    "4.1 4.15 4.16 4.2",
    "4.6 4.8 4.10",
)
SHOWN = {7: "`make gpt`", 12: "`make nodes`", 14: "`make train`"}


def lines(exercise: Exercise) -> int:
    """Lines of code in the exercise's regions."""
    text = exercise.solution_path.read_text(encoding="utf-8")
    inside = [
        line.strip()
        for region in regions_of(text)
        if region.exercise == exercise.id
        for line in text.split("\n")[region.start : region.end - 1]
    ]
    return sum(bool(line) and not line.startswith("#") for line in inside)


def minutes(exercise: Exercise) -> int:
    """The estimate, rounded up to 5 minutes."""
    text = exercise.guidelines_path.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(exercise.id)} .*?(?=^## |\Z)", text, re.M | re.S)
    words = len(section[0].split()) if section else 0
    return 5 * math.ceil((BEGIN + words / WORDS + LINE * lines(exercise)) / 5)


def hours(exercises: list[Exercise]) -> str:
    """The sum of them, to half an hour."""
    return f"{round(sum(map(minutes, exercises)) / 30) / 2:g}"


def phases(course: Course) -> list[str]:
    """A row per phase."""

    def row(phase: Phase) -> str:
        e = phase.exercises
        written, points = sum(map(lines, e)), sum(x.points for x in e)
        return f"| {phase.number} | {len(e)} | {points} | {written:,} | {hours(e)} |"

    head = ["| phase | exercises | points | lines to write | hours |", "|---|---|---|---|---|"]
    return [*head, *map(row, course.phases)]


def term(course: Course) -> list[str]:
    """A row per week of TERM."""
    rows = ["| week | exercises | points | hours | shown in class |", "|---|---|---|---|---|"]
    for week, ids in enumerate(TERM, 1):
        chosen = [course.exercise(each) for each in ids.split()]
        points = sum(e.points for e in chosen)
        shown = SHOWN.get(week, "the class report")
        listed = ", ".join(e.id for e in chosen)
        rows.append(f"| {week} | {listed} | {points} | {hours(chosen)} | {shown} |")
    return rows


def each(course: Course) -> list[str]:
    """Minutes of every exercise, in a row per phase."""
    rows = ["| phase | minutes for each exercise |", "|---|---|"]
    for phase in course.phases:
        listed = ", ".join(f"{e.id}: {minutes(e)}" for e in phase.exercises)
        rows.append(f"| {phase.number} | {listed} |")
    return rows


def main() -> int:
    """Print the tables."""
    course = load_course()
    print("\n\n".join("\n".join(table(course)) for table in (phases, term, each)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
