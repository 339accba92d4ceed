"""What all labs have in common: who may have one, which one a seed deals, points, progress."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from ..course import progress
from ..course.catalogue import Exercise, has_solutions, load_course, root
from ..course.version import course_version
from ..host.terminal import say
from ..host.toml import tomllib

POINTS = {1: 10, 2: 15, 3: 20, 4: 30}  # of a lab, by its level

Dealt = TypeVar("Dealt")


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One lab: ``kind`` is its command's name, ``exercise`` the one that it is about."""

    id: str
    kind: str
    exercise: str
    level: int
    title: str

    @property
    def points(self) -> int:
        """Points that are to be had."""
        return POINTS[self.level]

    @property
    def about(self) -> Exercise:
        """The exercise that it is about."""
        return load_course().exercise(self.exercise)

    @property
    def exercises(self) -> list[Exercise]:
        """All exercises that it is about."""
        return [self.about]

    @property
    def spoils(self) -> list[str]:
        """The exercises whose solutions are in the file that is handed out."""
        return [e.id for e in self.about.phase.exercises if e.file == self.about.file]


Made = TypeVar("Made", bound=Lab)


@dataclass(frozen=True)
class Part:
    """One thing that was graded: its points, and one line that says why."""

    name: str
    points: float
    most: float
    text: str


def data_files(kind: str) -> list[Path]:
    """The files with what was chosen by hand for labs of a kind, phase by phase.

    ValueError with one line where they are not: in a hand-out, before they are released.
    """
    found = sorted((root() / "labs" / kind).glob("phase*.toml"))
    if not found:
        raise ValueError(f"this hand-out has no labs of the kind {kind!r}: ask your instructor")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The file as data; ValueError with one line that names it if it can't be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is no TOML: {error}") from None


def seed_or_own(asked: int | None) -> int:
    """The seed that is asked for, or this folder's."""
    return seed_of_this_folder() if asked is None else asked


def seed_of_this_folder() -> int:
    """The seed where none is asked for: it depends on the course's folder, and on no name in it
    that would say who the learner is."""
    digest = hashlib.sha256(str(root()).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1_000_000


def fitting(
    labs: Iterable[Made], exercise_id: str | None, phase: int | None, level: int | None
) -> list[Made]:
    """The labs about an exercise, of a phase, of a level; None: of all.

    ValueError if there is no such exercise or phase.
    """
    exercise = load_course().exercise(exercise_id) if exercise_id else None
    of = load_course().phase(phase) if phase is not None else None
    return [
        lab
        for lab in labs
        if (exercise is None or exercise in lab.exercises)
        and (of is None or lab.about.phase == of)
        and level in (None, lab.level)
    ]


def dealt(seed: int, what: str, choices: Sequence[Dealt]) -> Dealt:
    """One of the choices: the same for the same seed and ``what``; ValueError if there is none."""
    if not choices:
        raise ValueError(f"there is no {what}")
    return random.Random(f"{seed} {what}").choice(choices)


def may_see(exercise_id: str) -> bool:
    """Whether a lab that holds nearly all of the exercise's solution spoils nothing any more."""
    mine = progress.entry(exercise_id)
    return bool(mine.get("passed_once") or mine.get("gave_up"))


def need_solutions(what: str) -> None:
    """ValueError with one line where there are no solutions."""
    if not has_solutions():
        raise ValueError(f"{what} need the solutions, which are not here: ask your instructor")


def need_release(exercise_id: str, lab_id: str, spoil: bool) -> None:
    """ValueError with one line unless the lab can be made here, and spoils nothing."""
    need_solutions("labs")
    if not spoil and not may_see(exercise_id):
        raise ValueError(
            f"lab {lab_id} shows nearly all of a solution that you have not written yet: pass its "
            "exercises or give them up first (instructors add --spoil)"
        )


def check_folder(file: Path | None) -> None:
    """ValueError with one line, before anything is graded, if the result has no folder."""
    if file is not None and not file.parent.is_dir():
        raise ValueError(f"--json: there is no folder {file.parent}; nothing is graded")


def passed(lab_id: str, points: float, most: float) -> list[str]:
    """Remember the best result of a lab; warnings if it could not be saved."""
    best = max(points, float(results().get(lab_id, {}).get("points", points)))
    return progress.update_lab(lab_id, points=best, most=most)


def results() -> dict[str, dict[str, Any]]:
    """What is remembered of labs, by their ids."""
    return progress.labs()


def told(
    lab_id: str, parts: Iterable[Part], out: Console, file: Path | None, more: Mapping[str, Any]
) -> int:
    """Show and remember the result of a lab, and write it to ``file``: 0 if nothing is missing.

    ``more``: further fields of the file.
    """
    parts = list(parts)
    points, most = sum(p.points for p in parts), sum(p.most for p in parts)
    for part in parts:
        style = "bold green" if part.points == part.most else "bold red"
        out.print(Text(f"{part.name}: {part.points:g} of {part.most:g}", style))
        say(out, part.text, indent="  ")
    out.print(f"lab {lab_id}: {points:g} of {most:g} points", highlight=False)
    for warning in passed(lab_id, points, most):
        say(out, warning, "yellow")
    if file is not None:
        data = {"course_version": course_version(), "lab": lab_id, "points": points, "most": most}
        data |= dict(more) | {"parts": [asdict(part) for part in parts]}
        file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if points == most else 1
