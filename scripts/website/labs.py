"""Labs in the site: a table below each phase's page, and an index by kind, level and exercise.

A program with a bug is listed by its phase and level: its exercise would tell where the bug is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distlab.course.catalogue import Course, Phase
from distlab.labs.index import KINDS, LETTERS, Listed, listed

from .exercises import linked

ABOUT = {
    "debug": "A program with a wrong implementation in it, and a report as a user would file it. "
    "You name rank, line and cause, and mend the program.",
    "tests": "You write the checks of an exercise. They must pass right implementations, and they "
    "earn points for the wrong ones that they kill.",
    "review": "A change with a description. You approve it, or name the line and the axis of its "
    "defect. A false alarm costs points.",
    "predict": "You fill in numbers of a run. Then the ledger, the memory and the virtual clock "
    "answer.",
}


def page(course: Course) -> str:
    """The index of all labs."""
    pages = ", ".join(f"[phase {p.number}](/{p.folder}/labs.md)" for p in course.phases)
    text = [
        "# Labs\n",
        "Labs are tasks beside the exercises: you read a run, prove that code is right, or predict "
        f"what it costs. A page for each phase teaches how: {pages}. `distlab lab list` shows your "
        "points.",
    ]
    for kind in LETTERS.values():
        command = KINDS[kind][1]
        text.append(f"\n## {KINDS[kind][0].capitalize()}\n\n{ABOUT[kind]} (`{command}`)\n")
        own = [lab for lab in listed() if lab.kind == kind]
        if len({lab.level for lab in own}) > 1:
            text += ["### By level\n", _levels(course, own)]
        text += ["### By exercise\n", _exercises(course, own)]
        whole = [lab for lab in own if not lab.phase]
        if whole:
            rows = [f"| {lab.id} | {lab.title} |" for lab in whole]
            text += ["### Whole runs\n", _table(["lab", "question"], rows)]
    return "\n".join(text) + "\n"


def table(phase: Phase) -> str:
    """The labs of a phase, for the end of its page."""
    rows = [
        f"| {lab.id} | {KINDS[lab.kind][0]} | {lab.level} | {lab.points:g} | {lab.title} |"
        for lab in listed()
        if lab.phase == phase.number
    ]
    head = ["lab", "kind", "level", "points", "title"]
    text = ["\n## The labs of this phase\n", "All labs stand in the [index](/labs.md).\n"]
    return "\n".join([*text, _table(head, rows)]) + "\n"


def _levels(course: Course, labs: Sequence[Listed]) -> str:
    """How many labs there are of each level, phase by phase."""
    count = Counter((lab.phase, lab.level) for lab in labs)
    levels = sorted({lab.level for lab in labs})
    rows = [
        f"| {p.number} | " + " | ".join(str(count[p.number, n] or "–") for n in levels) + " |"
        for p in course.phases
    ]
    return _table(["phase", *(f"level {n}" for n in levels)], rows) + "\n"


def _exercises(course: Course, labs: Sequence[Listed]) -> str:
    """The labs about each exercise; of programs with a bug how many there are."""
    rows = []
    for exercise in course.exercises:
        own = [lab for lab in labs if lab.exercise == exercise.id]
        if own and own[0].kind == "debug":
            rows.append(f"| {linked(exercise)} {exercise.title} | {len(own)} |")
        elif own:
            ids = ", ".join(lab.id for lab in own)
            rows.append(f"| {linked(exercise)} {exercise.title} | {ids} |")
    return _table(["exercise", "labs"], rows) + "\n"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
    return "\n".join(lines)
