"""The folder of results: the gradings, and the files made from them for students and tables."""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from ..course.version import course_version
from ..grading.verdicts import Report, dumped, loaded, tier_totals
from . import feedback, scoring
from .config import ClassConfig
from .lab_rules import LabResult
from .submissions import Submission

COURSE = (
    *("course.toml", "distlab/*", "given", "solutions", "tests/phase*"),
    *("tests/mutants", "labs/*/*.toml", "labs/*/programs"),
)
NO_PART = ("classes", "commands", "simulate", "cli.py")  # of a verdict


@dataclass(frozen=True)
class StudentReports:
    """The outcome of one submission. ``problem``: one line if the grading could not end."""

    reports: tuple[Report, ...] = ()
    labs: tuple[LabResult, ...] = ()
    problem: str = ""
    graded: str = ""

    def as_text(self) -> str:
        """One line of JSON."""
        own = {"reports": [dumped(r) for r in self.reports], "labs": list(map(asdict, self.labs))}
        return json.dumps(vars(self) | own)


def reports_of(text: str) -> StudentReports:
    """Read the text that ``as_text`` has written."""
    data = json.loads(text)
    labs = tuple(LabResult(**lab | {"parts": tuple(lab["parts"])}) for lab in data["labs"])
    return StudentReports(**data | {"reports": tuple(map(loaded, data["reports"])), "labs": labs})


@dataclass(frozen=True)
class Attempt:
    """One graded submission of a student, with its number (1 is the first)."""

    number: int
    submission: Submission
    found: StudentReports
    late: scoring.Lateness
    points: dict[str, float]

    @property
    def score(self) -> float:
        """The points that it earns, less the cost of being late."""
        return scoring.total(self.points, self.late)

    @property
    def problem(self) -> str:
        """The reason why there is nothing to show, in one line."""
        return self.submission.problem or self.found.problem


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing of it, also if the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def now() -> str:
    """This moment, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def fingerprint() -> str:
    """A hash of everything that makes a verdict: checks, toolkit, given code, solutions."""
    found = hashlib.sha256(version("torch").encode())
    for pattern in COURSE:
        for path in sorted(p for p in root().glob(pattern) if p.name not in NO_PART):
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            for file in files:
                found.update(file.relative_to(root()).as_posix().encode() + b"\0")
                found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def class_json(config: ClassConfig, course: str, way: str, started: str) -> str:
    """The versions with which the results were graded."""
    facts = {
        "schema": 1,
        "config": config.as_json(),
        "course_version": course_version(),
        "fingerprint": course,
        "way": way,
        "seed": config.seed,
        "started": started,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


def write_student(folder: Path, config: ClassConfig, attempt: Attempt) -> None:
    """The counting attempt's result and feedback."""
    student = attempt.submission.student
    data = json.dumps(_result(config, attempt), indent=2, ensure_ascii=False)
    write(folder / "result.json", data + "\n")
    title, facts = f"{config.name}: {student}", told(config, attempt)
    reports = attempt.found.reports
    write(folder / "feedback.md", feedback.as_markdown(title, facts, reports))
    write(folder / "feedback.html", feedback.as_html(title, facts, reports))


def told(config: ClassConfig, attempt: Attempt) -> list[str]:
    """The lines above the report: score, time, and problems."""
    submission, late = attempt.submission, attempt.late
    lines = [f"score: {attempt.score:g} of {scoring.highest(config):g} points"]
    if submission.submitted is not None:
        when = submission.submitted.astimezone(config.zone)
        lines.append(f"handed in: {when:%Y-%m-%d %H:%M:%S} ({config.time_zone})")
    if late.days:
        days = f"{late.days} day{'s' if late.days > 1 else ''}"
        lines.append(f"late: {days}, which costs {late.penalty_percent:g} % of the points")
    if attempt.problem:
        lines.append(f"not graded: {attempt.problem}")
    if submission.version is not None:
        lines.append(f"made from version {submission.version} of the course")
    if config.release and submission.submitted and submission.submitted < config.release:
        lines.append("note: it was made before the release: is its date right?")
    lines += [f"note: {note}" for note in submission.notes]
    weighed = [e.id for e in config.exercises() if config.worth(e) != e.points]
    if weighed:
        parts = ", ".join(f"{i} {attempt.points[i]:g} of {config.points[i]:g}" for i in weighed)
        lines.append(f"points in this class: {parts}")
    return lines + [_lab_line(config, attempt, lab) for lab in attempt.found.labs]


def _lab_line(config: ClassConfig, attempt: Attempt, lab: LabResult) -> str:
    """A lab with its points, and what they are for."""
    name = lab.name if lab.name == lab.lab else f"{lab.name} ({lab.lab})"
    told = lab.problem or "; ".join(lab.parts)
    return f"lab {name}: {attempt.points[lab.name]:g} of {config.labs[lab.name]:g} points: {told}"


def _result(config: ClassConfig, attempt: Attempt) -> dict[str, Any]:
    submission = attempt.submission
    reports = [
        replace(r, student=submission.student, submission_hash=submission.digest)
        for r in attempt.found.reports
    ]
    when = submission.submitted
    return {
        "schema": 1,
        "student": submission.student,
        "course_version": course_version(),
        "submission_hash": submission.digest,
        "submitted": when and when.isoformat(),
        "graded": attempt.found.graded,
        "late": asdict(attempt.late),
        "score": attempt.score,
        "max_score": scoring.highest(config),
        "problem": attempt.problem,
        "tiers": tier_totals(e for r in reports for e in r.exercises),
        "phases": [r.as_json() for r in reports],
        "labs": [
            asdict(lab) | {"points": attempt.points[lab.name], "max_points": config.labs[lab.name]}
            for lab in attempt.found.labs
        ],
        "attempt": attempt.number,
    }


def grades_csv(config: ClassConfig, rows: Iterable[tuple[str, Attempt]]) -> str:
    """The table for a grade book: one row for each student."""
    ids = [*(e.id for e in config.exercises()), *config.labs]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["id", *ids, "total", "late", "version"])
    for student, attempt in sorted(rows, key=lambda row: row[0]):
        numbers = [*(attempt.points[i] for i in ids), attempt.score, attempt.late.days]
        table.writerow([_cell(student), *(f"{n:g}" for n in numbers), _cell(course_version())])
    return text.getvalue()


def _cell(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def log_text(config: ClassConfig, attempts: Sequence[Attempt], counts: Attempt) -> str:
    """Say which of a student's submissions counts, and why."""
    lines = []
    for attempt in attempts:
        submission = attempt.submission
        lines += [
            f"attempt {attempt.number} of {len(attempts)}: {submission.label or '(nothing)'}",
            f"  files: {submission.digest}",
            *(f"  {line}" for line in told(config, attempt)),
            f"  graded: {attempt.found.graded or 'no'}",
        ]
    if len(attempts) > 1:
        rule = "the best" if config.counts == "best" else "the last in time"
        lines.append(f"attempt {counts.number} counts ({rule})")
    return "\n".join(lines) + "\n"
