"""The outcome of a class, read from the results folder: students, their exercises, their checks.

Nothing is graded here. A file is told in one line and left out if it can't be read, or if it lacks
a fact that the report needs.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..grading.verdicts import VERDICTS

FAILING = ("fail", "hang", "crash", "error")


@dataclass(frozen=True)
class Failed:
    """A check that a student's exercise did not pass, as the grader told it."""

    check: str
    title: str
    cause: str
    message: str
    line: str


@dataclass(frozen=True)
class Graded:
    """A student's exercise: verdict, points, and its failing checks, the decisive one first."""

    id: str
    title: str
    verdict: str
    points: float
    max_points: float
    failed: tuple[Failed, ...] = ()


@dataclass(frozen=True)
class Student:
    """One student's result. ``digest``: the hash of the submission that counts. ``labs``: the share
    of the points of each lab that was handed in."""

    id: str
    score: float
    max_score: float
    digest: str
    problem: str
    days_late: float
    submitted: datetime.datetime | None
    exercises: tuple[Graded, ...]
    labs: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The score as a part of the points that could be had, 0 to 1."""
        return self.score / self.max_score if self.max_score > 0 else 0.0


@dataclass(frozen=True)
class ClassResults:
    """A results folder: the versions and rules of the grading, the students,
    and the unreadable files."""

    about: dict[str, Any]
    students: tuple[Student, ...]
    unread: tuple[str, ...]

    @property
    def graded(self) -> list[Student]:
        """Students whose submission could be graded."""
        return [s for s in self.students if not s.problem]


def load_results(folder: Path) -> ClassResults:
    """Read ``class.json`` and ``students/*/result.json``; ValueError if this is no results folder.

    ``class.json`` may be missing: then the report says less.
    """
    if not (folder / "students").is_dir():
        raise ValueError(f"{folder} has no folder students/: is it where a class was graded?")
    about: dict[str, Any] = {}
    unread = []
    if (folder / "class.json").is_file():
        try:
            about = _object(folder / "class.json")
        except ValueError as error:
            unread.append(f"class.json: {error}")
    worth = dict((about.get("config") or {}).get("points") or {})
    students = []
    for path in sorted((folder / "students").glob("*/result.json")):
        try:
            students.append(_student(_object(path), worth))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            unread.append(f"a student's result.json: {reason}")
    return ClassResults(about, tuple(students), tuple(unread))


def moment(text: object) -> datetime.datetime | None:
    """A time in ISO's form, with a zone (UTC if it names none); None for anything else."""
    try:
        found = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _student(data: dict[str, Any], worth: dict[str, float]) -> Student:
    exercises = [_graded(e, worth) for phase in data.get("phases", ()) for e in phase["exercises"]]
    return Student(
        id=str(data["student"]),
        score=float(data["score"]),
        max_score=float(data["max_score"]),
        digest=str(data.get("submission_hash") or ""),
        problem=str(data.get("problem") or ""),
        days_late=float((data.get("late") or {}).get("days", 0)),
        submitted=moment(data.get("submitted")),
        exercises=tuple(exercises),
        labs={
            str(lab["name"]): float(lab["share"])
            for lab in data.get("labs", ())
            if not lab["problem"]
        },
        tiers={str(tier): dict(counts) for tier, counts in (data.get("tiers") or {}).items()},
    )


def _graded(data: dict[str, Any], worth: dict[str, float]) -> Graded:
    """``worth``: the points of exercises that count otherwise than in the course."""
    if data["verdict"] not in VERDICTS:
        raise ValueError(f"no verdict: {data['verdict']!r}")
    return Graded(
        id=str(data["id"]),
        title=str(data["title"]),
        verdict=data["verdict"],
        points=float(data["points"]),
        max_points=float(worth.get(str(data["id"]), data["max_points"])),
        failed=_failed(data["checks"]) if data["verdict"] in FAILING else (),
    )


def _failed(checks: Iterable[dict[str, Any]]) -> tuple[Failed, ...]:
    """The failing checks in the order in which they ran: the first one decides, as
    in the grader's report."""
    return tuple(
        Failed(
            check=str(c["name"]).split("[")[0],
            title=str(c.get("title") or c["name"]),
            cause=str(c.get("cause") or c["verdict"]),
            message=str(c.get("message") or ""),
            line=str(c.get("line") or ""),
        )
        for c in checks
        if c["verdict"] in FAILING
    )
