"""Verdicts of checks and exercises, and the report made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from ..course.version import course_version

TIERS = ("virtual", "gloo", "nccl", "cuda")
SHOWN_TIER = {"nccl": "nccl rules (simulated)"}
VERDICTS = ("pass", "fail", "blank", "error", "hang", "crash", "needs", "blocked")


def now() -> str:
    """This moment, in UTC, as ISO 8601 writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class CheckResult:
    """One check: its verdict, and for a failure the message, the cause and the line."""

    name: str
    verdict: str
    message: str = ""
    cause: str = ""
    rank: int | None = None
    line: str = ""
    title: str = ""
    printed: dict[int, str] = field(default_factory=dict)  # output of each rank, with stderr
    seconds: float = 0.0
    tier: str = "gloo"


class NotRun(Exception):
    """A check was not run; it tells the reason, and has this verdict."""

    def __init__(self, verdict: str, message: str, line: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.result = CheckResult("", verdict, message, cause or verdict, line=line)

    def __reduce__(self) -> tuple[type[NotRun], tuple[str, ...]]:
        told = self.result
        return NotRun, (told.verdict, told.message, told.line, told.cause)


@dataclass
class ExerciseResult:
    """One exercise: pass only if every check that could run passed, and at least one did."""

    id: str
    title: str
    max_points: int
    file: str = ""
    seconds: float = 0.0
    checks: list[CheckResult] = field(default_factory=list)
    hints_used: int = 0
    used_solution_of: list[str] = field(default_factory=list)
    partial: bool = False

    @property
    def failing(self) -> list[CheckResult]:
        """The checks that found something wrong, in the order in which they ran."""
        return [c for c in self.checks if c.verdict in ("fail", "hang", "crash", "error")]

    @property
    def decisive(self) -> CheckResult | None:
        """The check that decides the verdict: the first that failed, blank ones last."""
        ran = [c for c in self.checks if c.verdict not in ("pass", "needs")]
        ran.sort(key=lambda c: (c.verdict == "blank", c.verdict == "blocked"))
        return ran[0] if ran else None

    @property
    def verdict(self) -> str:
        """The verdict of the exercise, one of VERDICTS."""
        if self.decisive:
            return self.decisive.verdict
        return "pass" if any(c.verdict == "pass" for c in self.checks) else "needs"

    @property
    def points(self) -> int:
        """Points earned: all or nothing, or with ``partial`` the share of the checks that passed,
        rounded down. Checks that could not run here do not count."""
        if self.verdict == "pass" or not self.partial:
            return self.max_points if self.verdict == "pass" else 0
        counted = [c for c in self.checks if c.verdict != "needs"]
        passed = sum(c.verdict == "pass" for c in counted)
        return self.max_points * passed // max(len(counted), 1)

    @property
    def needs(self) -> list[str]:
        """The absent things because of which checks did not run."""
        return sorted({c.message for c in self.checks if c.verdict == "needs"})


@dataclass
class Report:
    """All that was graded in one run. ``along``: exercises that were not asked for, and passed with
    all their checks, because others build on them. ``references``: how the recorded runs that it
    was compared with were made, by workload."""

    phase: int
    impl: str
    seed: int
    device: str
    exercises: list[ExerciseResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    course_version: str = field(default_factory=course_version)
    graded: str = field(default_factory=now)
    student: str | None = None  # empty where learners grade their own work
    submission_hash: str | None = None
    references: dict[str, str] = field(default_factory=dict)
    along: list[str] = field(default_factory=list)

    @property
    def score(self) -> int:
        """Points earned."""
        return sum(e.points for e in self.exercises)

    @property
    def max_score(self) -> int:
        """Points that could be had in this run."""
        return sum(e.max_points for e in self.exercises)

    @property
    def passed(self) -> bool:
        """Whether everything that was asked for passed."""
        return bool(self.exercises) and all(e.verdict == "pass" for e in self.exercises)

    def check(self, name: str) -> CheckResult | None:
        """The result of the check called ``name``: its worst tier, if it ran on several."""
        found = [c for e in self.exercises for c in e.checks if c.name.split("[")[0] == name]
        found.sort(key=lambda c: (c.verdict == "pass", c.verdict == "needs"))
        return found[0] if found else None

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, as docs/schema/run.schema.json describes it."""
        return {
            "course_version": self.course_version,
            "student": self.student,
            "submission_hash": self.submission_hash,
            "graded": self.graded,
            "phase": self.phase,
            "impl": self.impl,
            "score": self.score,
            "max_score": self.max_score,
            "seed": self.seed,
            "device": self.device,
            "tiers": tier_totals(self.exercises),
            "references": self.references,
            "exercises": [_exercise_json(e) for e in self.exercises],
        }


def tier_totals(exercises: Iterable[ExerciseResult]) -> dict[str, dict[str, int]]:
    """How many checks of each tier passed, failed, need an absent thing, or had nothing to run."""
    told = {"pass": "pass", "needs": "needs", "blank": "not_run", "blocked": "not_run"}
    totals: dict[str, dict[str, int]] = {}
    for check in (c for e in exercises for c in e.checks):
        count = totals.setdefault(check.tier, {"pass": 0, "fail": 0, "needs": 0, "not_run": 0})
        count[told.get(check.verdict, "fail")] += 1
    return {tier: totals[tier] for tier in TIERS if tier in totals}


def _exercise_json(e: ExerciseResult) -> dict[str, Any]:
    shown = ("name", "title", "tier", "verdict", "message", "cause", "rank", "line")
    return {
        "id": e.id,
        "title": e.title,
        "verdict": e.verdict,
        "points": e.points,
        "max_points": e.max_points,
        "seconds": round(e.seconds, 3),
        "checks": [{k: v for k, v in asdict(c).items() if k in shown} for c in e.checks],
        "needs": e.needs,
        "hints_used": e.hints_used,
        "used_solution_of": e.used_solution_of,
    }


def dumped(report: Report) -> str:
    """The report as one line of text."""
    exercises = [vars(e) | {"checks": [vars(c) for c in e.checks]} for e in report.exercises]
    return json.dumps(vars(report) | {"exercises": exercises})


def loaded(text: str) -> Report:
    """The report that ``dumped`` has written."""
    data = json.loads(text)

    def check(fields: dict[str, Any]) -> CheckResult:
        printed = {int(rank): said for rank, said in fields["printed"].items()}
        return CheckResult(**fields | {"printed": printed})

    exercises = [
        ExerciseResult(**e | {"checks": [check(c) for c in e["checks"]]}) for e in data["exercises"]
    ]
    return Report(**data | {"exercises": exercises})
