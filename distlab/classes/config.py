"""The rules of a class, read from ``class.toml``: every rule has a default.

A file of rules is for one hand-in. Dates without an offset are in the class's time zone; a date
without a time means the end of that day.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import zoneinfo
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..course.catalogue import Exercise, load_course
from .lab_rules import read_labs
from .reading import Table, read_toml

COUNTS = ("last", "best")
LATER = ("after_due_date", "after_published", "hidden")


@dataclass(frozen=True, kw_only=True)
class Late:
    """The cost of a late submission. Within ``grace_minutes`` it costs nothing. Then each day
    that has begun since the due date costs ``percent_per_day`` of the points. After
    ``cut_off_days`` no points are left."""

    grace_minutes: float = 0
    percent_per_day: float = 0
    cut_off_days: float | None = None


@dataclass(frozen=True, kw_only=True)
class Caps:
    """The limits of one submission: ``seconds`` of grading, ``memory_gb`` of each process, and
    ``unpacked_mb`` and ``files`` when it is unpacked. They end a broken submission: most
    submissions need far less."""

    seconds: float = 3600
    memory_gb: float = 8
    unpacked_mb: float = 200
    files: int = 20_000


@dataclass(frozen=True, kw_only=True)
class Gradescope:
    """What students see on Gradescope, and when. ``visibility`` holds for all
    exercises except those in ``hidden``, for which ``hidden_until`` holds. ``stdout``
    holds for the grader's output."""

    visibility: str = "visible"
    hidden: tuple[str, ...] = ()
    hidden_until: str = "after_due_date"
    stdout: str = "hidden"
    leaderboard: bool = False


@dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """The rules. Empty ``phases`` mean all phases for which anybody handed something
    in. ``points``: only for exercises that count otherwise than in the course. ``labs``: the points
    of those that count; ``released``: exercises whose solutions they may show. If ``due`` is None,
    nobody is late."""

    name: str = "class"
    time_zone: str = "UTC"
    release: datetime.datetime | None = None
    due: datetime.datetime | None = None
    late: Late = field(default_factory=Late)
    extensions: Mapping[str, datetime.datetime] = field(default_factory=dict)
    phases: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    points: Mapping[str, float] = field(default_factory=dict)
    labs: Mapping[str, float] = field(default_factory=dict)
    released: tuple[str, ...] = ()
    partial: bool = False
    seed: int = 1
    counts: str = "last"
    students: tuple[str, ...] = ()
    pattern: str = ""
    teams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    caps: Caps = field(default_factory=Caps)
    gradescope: Gradescope = field(default_factory=Gradescope)

    @property
    def zone(self) -> datetime.tzinfo:
        """The time zone of dates that name none."""
        return zone_called(self.time_zone)

    def exercises(self) -> list[Exercise]:
        """The exercises that count, in the order of the course."""
        chosen = [e for e in load_course().exercises if e.phase.number in self.phases]
        return [e for e in chosen if not self.only or e.id in self.only]

    def worth(self, exercise: Exercise) -> float:
        """The points that an exercise gives in this class."""
        return self.points.get(exercise.id, exercise.points)

    def team_of(self, student: str) -> str:
        """The team of a student; without one the student is alone in it."""
        return next((team for team, members in self.teams.items() if student in members), student)

    def due_for(self, student: str) -> datetime.datetime | None:
        """The student's due date: the latest extension of the student or of the team."""
        names = (student, *self.teams.get(student, ()))
        dates = [d for d in (self.due, *map(self.extensions.get, names)) if d is not None]
        return max(dates) if self.due is not None else None

    def as_json(self) -> dict[str, Any]:
        """All rules as plain data."""
        found = asdict(self)
        for key in ("release", "due"):
            found[key] = found[key] and found[key].isoformat()
        found["extensions"] = {who: d.isoformat() for who, d in self.extensions.items()}
        return found


def zone_called(name: str) -> datetime.tzinfo:
    """The time zone; ValueError if there is none of this name."""
    if name == "UTC":
        return datetime.timezone.utc  # also where the system has no list of zones
    return zoneinfo.ZoneInfo(name)


def clean_id(text: str) -> str:
    """An id that can be a folder's name and stand in a table. An id that had to
    be changed gets a mark."""
    clean = re.sub(r"[^\w.@+ -]", "_", text.encode("utf-8", "replace").decode()).strip(" .")[:80]
    if clean == text:
        return clean
    mark = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:6]
    return f"{clean or 'student'}-{mark}"


def load_class(path: Path | None = None) -> ClassConfig:
    """The rules in the file, or without one the defaults.

    Raises ValueError with the file, the key, what is allowed, and the nearest name that is known.
    """
    if path is None:
        return ClassConfig()
    top = read_toml(path)
    top.known("class", "dates", "late", "extensions", "exercises", "labs", "grading", "students",
              "teams", "limits", "gradescope")  # fmt: skip
    about = top.table("class")
    about.known("name", "time_zone")
    zone = _zone(about)
    dates = top.table("dates")
    dates.known("release", "due")
    extensions = top.table("extensions")
    students = top.table("students")
    students.known("ids", "pattern")
    grading = top.table("grading")
    grading.known("partial", "seed", "counts")
    found = ClassConfig(
        name=about.text("name", "class"),
        time_zone=about.text("time_zone", "UTC"),
        release=dates.date("release", zone),
        due=dates.date("due", zone),
        late=_late(top.table("late")),
        extensions={who: _needed(extensions.date(who, zone)) for who in extensions.values},
        **_exercises(top.table("exercises")),
        **read_labs(top.table("labs")),
        partial=grading.flag("partial"),
        seed=int(grading.number("seed", 1, least=0, whole=True)),
        counts=grading.choice("counts", COUNTS),
        students=students.texts("ids"),
        pattern=_pattern(students),
        teams=_teams(top.table("teams")),
        caps=_caps(top.table("limits")),
        gradescope=_gradescope(top.table("gradescope")),
    )
    for table, ids in ((students, found.students), (top.table("teams"), _names(found.teams))):
        for each in ids:
            if clean_id(each) != each:
                table.wrong(each, "an id has letters, digits, spaces and . @ + - _ alone")
    _agree(found, dates, extensions)
    return found


def _needed(date: datetime.datetime | None) -> datetime.datetime:
    assert date is not None
    return date


def _zone(about: Table) -> datetime.tzinfo:
    name = about.text("time_zone", "UTC")
    try:
        return zone_called(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
        about.wrong("time_zone", f"{name!r} is no time zone that this system knows", known, name)


def _late(table: Table) -> Late:
    table.known(*Late.__dataclass_fields__)
    cut = table.number("cut_off_days", 0, least=0) if "cut_off_days" in table.values else None
    return Late(
        grace_minutes=table.number("grace_minutes", 0, least=0),
        percent_per_day=table.number("percent_per_day", 0, least=0, most=100),
        cut_off_days=cut,
    )


def _caps(table: Table) -> Caps:
    table.known(*Caps.__dataclass_fields__)
    default = Caps()
    return Caps(
        seconds=table.number("seconds", default.seconds, least=1),
        memory_gb=table.number("memory_gb", default.memory_gb, least=1),
        unpacked_mb=table.number("unpacked_mb", default.unpacked_mb, least=1),
        files=int(table.number("files", default.files, least=1, whole=True)),
    )


def _gradescope(table: Table) -> Gradescope:
    table.known(*Gradescope.__dataclass_fields__)
    ids, hidden = [e.id for e in load_course().exercises], table.texts("hidden")
    for each in hidden:
        if each not in ids:
            table.wrong("hidden", f"there is no exercise {each!r}", ids, each)
    return Gradescope(
        visibility=table.choice("visibility", ("visible", *LATER)),
        hidden=hidden,
        hidden_until=table.choice("hidden_until", LATER),
        stdout=table.choice("stdout", (*reversed(LATER), "visible")),
        leaderboard=table.flag("leaderboard"),
    )


def _exercises(table: Table) -> dict[str, Any]:
    table.known("phases", "only", "points")
    course = load_course()
    ids = [e.id for e in course.exercises]
    only, worth = table.texts("only"), table.table("points")
    numbers = [p.number for p in course.phases if p.exercises]
    phases = table.numbers("phases")
    for number in phases:
        if number not in numbers:
            table.wrong("phases", f"there is no phase {number}: there are {numbers}")
    for each in only:
        if each not in ids:
            table.wrong("only", f"there is no exercise {each!r}", ids, each)
        if phases and course.exercise(each).phase.number not in phases:
            table.wrong("only", f"exercise {each} is in none of the phases {list(phases)}")
    worth.known(*ids, what="exercise")
    found = phases or tuple(sorted({course.exercise(each).phase.number for each in only}))
    points = {each: worth.number(each, 0, least=0) for each in worth.values}
    return {"phases": found, "only": only, "points": points}


def _pattern(table: Table) -> str:
    text = table.text("pattern", "")
    try:
        named = re.compile(text).groupindex
    except re.error as error:
        table.wrong("pattern", f"{text!r} is no regular expression: {error}")
    if text and "student" not in named:
        table.wrong("pattern", f"{text!r} has no group (?P<student>…) that names the student")
    return text


def _teams(table: Table) -> dict[str, tuple[str, ...]]:
    teams = {name: table.texts(name) for name in table.values}
    seen: dict[str, str] = {}
    for team, members in teams.items():
        if not members:
            table.wrong(team, "a team needs at least one student")
        for member in members:
            if member in seen:
                table.wrong(team, f"{member!r} is in team {seen[member]!r}, too")
            seen[member] = team
    return teams


def _names(teams: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [*teams, *(member for members in teams.values() for member in members)]


def _agree(found: ClassConfig, dates: Table, extensions: Table) -> None:
    """Check the keys that depend on each other."""
    if found.release and found.due and found.due <= found.release:
        dates.wrong("due", f"{found.due} is not after the release, {found.release}")
    names = {*found.students, *_names(found.teams)}
    for who, date in found.extensions.items():
        if found.due is None:
            extensions.wrong(who, "an extension needs a due date: set due in [dates]")
        if date <= found.due:
            extensions.wrong(who, f"{date} is not after the due date, {found.due}")
        if found.students and who not in names:
            extensions.wrong(who, "no student or team has this id", names, who)
