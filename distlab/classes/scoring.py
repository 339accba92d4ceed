"""The score of a submission: points per exercise, less the cost of being late."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..course.catalogue import Exercise
from ..grading.verdicts import Report
from .config import ClassConfig
from .lab_rules import LabResult

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Lateness:
    """The days that have begun since the due date, and the percentage of the
    points that they cost."""

    days: int = 0
    penalty_percent: float = 0


def lateness(config: ClassConfig, student: str, submitted: datetime.datetime | None) -> Lateness:
    """How late a submission is; one with an unknown time is not late."""
    due = config.due_for(student)
    if due is None or submitted is None:
        return Lateness()
    after = submitted - due
    if after <= datetime.timedelta(minutes=config.late.grace_minutes):
        return Lateness()
    days = math.ceil(after / DAY)
    cut = config.late.cut_off_days
    if cut is not None and after > cut * DAY:
        return Lateness(days, 100)
    return Lateness(days, min(100, days * config.late.percent_per_day))


def points(
    config: ClassConfig, reports: Sequence[Report], labs: Sequence[LabResult] = ()
) -> dict[str, float]:
    """The points of each exercise and lab that counts, before the cost of being late."""
    earned = {e.id: e.points / e.max_points for r in reports for e in r.exercises}
    found = {e.id: _share(config, e, earned.get(e.id, 0)) for e in config.exercises()}
    shares = {lab.name: lab.share for lab in labs}
    return found | {
        name: round(most * shares.get(name, 0), 2) for name, most in config.labs.items()
    }


def _share(config: ClassConfig, exercise: Exercise, share: float) -> float:
    return round(config.worth(exercise) * share, 2)


def total(earned: dict[str, float], late: Lateness) -> float:
    """The score: two decimals. False alarms in labs take points, but never below none."""
    return round(max(0, sum(earned.values())) * (1 - late.penalty_percent / 100), 2)


def highest(config: ClassConfig) -> float:
    """The points that can be had."""
    return round(sum(map(config.worth, config.exercises())) + sum(config.labs.values()), 2)
