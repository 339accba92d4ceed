"""When a class worked: commits and submissions per day, before the due date and after it."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .drawing import columns

MOST_DAYS = 35
LABELS = 12  # that fit below the columns


@dataclass(frozen=True)
class TimeLine:
    """Pictures of commits and of submissions per day; ``early``: commits before the first day
    shown. ``with_history``: students whose commits are known."""

    commits: Markup
    submissions: Markup
    early: int
    total: int
    with_history: int
    due: str


def time_line(
    commits: Sequence[Sequence[datetime.datetime]],
    submitted: Sequence[datetime.datetime],
    due: datetime.datetime | None,
) -> TimeLine | None:
    """The time line of the students' ``commits`` (one sequence per student);
    None if there are none."""
    zone = due.tzinfo if due else datetime.timezone.utc
    by_day = Counter(t.astimezone(zone).date() for times in commits for t in times)
    if not by_day:
        return None
    handed = Counter(t.astimezone(zone).date() for t in submitted)
    anchors = [*by_day, *handed, *([due.date()] if due else [])]
    last = max(anchors) if not due else min(max(anchors), due.date() + datetime.timedelta(days=10))
    first = max(min(anchors), last - datetime.timedelta(days=MOST_DAYS - 1))
    days = [first + datetime.timedelta(days=i) for i in range((last - first).days + 1)]
    every = -(-len(days) // LABELS)
    labels = [_label(day, due) if i % every == 0 else "" for i, day in enumerate(days)]
    line = None
    if due and first <= due.date() <= last:
        start = datetime.datetime.combine(first, datetime.time(), tzinfo=zone)
        line = ((due - start) / datetime.timedelta(days=len(days)), "due")
    below = "days before (-) and after (+) the due date" if due else "day"

    def drawn(counts: Counter[datetime.date], what: str, colour: int) -> Markup:
        counted = [counts[day] for day in days]
        return columns(
            counted, labels, what=what, below=below, line=line, colour=colour, height=150
        )

    return TimeLine(
        commits=drawn(by_day, "commits", 0),
        submissions=drawn(handed, "submissions", 1) if handed else Markup(""),
        early=sum(n for day, n in by_day.items() if day < first),
        total=sum(by_day.values()),
        with_history=sum(1 for times in commits if times),
        due=due.strftime("%Y-%m-%d %H:%M %Z") if due else "",
    )


def _label(day: datetime.date, due: datetime.datetime | None) -> str:
    if due is None:
        return day.strftime("%m-%d")
    return f"{(day - due.date()).days:+d}".replace("+0", "0")
