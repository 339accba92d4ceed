"""Which labs count in a class, which of them a student gets, and what became of one."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..course.catalogue import load_course
from ..labs.frame import dealt
from ..labs.index import SLOT, SOLVED, Listed, fitting, listed
from .reading import Table

SHOWING = ("debug", "review")  # kinds that show nearly a whole solution


@dataclass(frozen=True)
class LabResult:
    """A student's result of one lab. ``name``: as the rules call it. ``share``: of the points,
    below zero for a false alarm. ``problem``: one line if nothing was graded."""

    name: str
    lab: str
    share: float = 0.0
    parts: tuple[str, ...] = ()
    problem: str = ""


def read_labs(table: Table) -> dict[str, Any]:
    """The rules of labs: points by name, and the exercises whose solutions are known."""
    table.known("points", "released")
    worth, released = table.table("points"), table.texts("released")
    ids = [e.id for e in load_course().exercises]
    for each in released:
        if each not in ids:
            table.wrong("released", f"there is no exercise {each!r}", ids, each)
    labs = {name: worth.number(name, 0, least=0) for name in worth.values}
    for name in labs:
        if not fitting(name):
            names = [lab.id for lab in listed()]
            text = f'there is no lab {name!r}: name one, or "D1 level 2" for one of several'
            worth.wrong(name, text, names, name)
        if name in SOLVED:
            worth.wrong(name, "labs.md of its phase solves it step by step: choose another one")
        if not choices(name, labs, released):
            lacking = sorted({each for lab in fitting(name) for each in shows(lab)} - {*released})
            worth.wrong(
                name,
                f"its labs show solutions of {', '.join(lacking)}: name them in [labs] released "
                "once the class may see them",
            )
    return {"labs": labs, "released": released}


def shows(lab: Listed) -> set[str]:
    """The exercises of which the lab shows a solution."""
    if lab.kind not in SHOWING:
        return set()
    exercise = load_course().exercise(lab.exercise)
    if lab.kind == "review":  # it leaves out what is not released
        return {exercise.id}
    return {e.id for e in exercise.phase.exercises if e.file == exercise.file}


def choices(name: str, labs: Collection[str], released: Collection[str]) -> list[Listed]:
    """The labs that a student may get for ``name``; of several those that no other name means."""
    allowed = [lab for lab in fitting(name) if shows(lab) <= {*released}]
    if SLOT.fullmatch(name):
        return [lab for lab in allowed if lab.id not in (*labs, *SOLVED)]
    return allowed


def seed_of(seed: int, owner: str) -> int:
    """The seed of a student's or a team's labs, in a class with this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {owner}".encode()).digest()[:4], "big") % 10**6


def labs_for(
    labs: Mapping[str, float], released: Collection[str], seed: int, owner: str
) -> dict[str, Listed]:
    """The labs of a student or a team, by the names that the rules give them."""
    own = seed_of(seed, owner)
    return {name: dealt(own, f"lab {name}", choices(name, labs, released)) for name in labs}
