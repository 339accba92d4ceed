"""The report on a class: one page without names, to be looked at with the class.

Its contents come from the results folder. Code around a line and the time line come from the
submissions, if they are given. Jinja escapes everything that is put into the page.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..course.catalogue import Course, Exercise, load_course
from ..explain.causes import what_they_do
from ..grading.verdicts import SHOWN_TIER, TIERS, VERDICTS
from ..grading.wrong import Mutant
from .anonymous import Mask, vocabulary
from .drawing import columns, patterns, shares, swatch
from .guideline import place_of, quoted
from .misconceptions import Misconception, in_order, misconceptions, recurring
from .outcomes import ClassResults, Student, moment
from .page import render
from .repository import Commits
from .results import write
from .snippets import Line, snippet
from .timeline import time_line

FIRST = 5  # to discuss
CARDS = 15  # so many misconceptions are shown in full
LEAST = 2  # students: a single student could be recognised by the code
BINS = 10
MEANING = {
    "pass": "all checks that could run passed",
    "fail": "a check found something wrong",
    "blank": "not written yet",
    "error": "the file can't be imported",
    "hang": "ranks wait for ever, or a loop never ends",
    "crash": "a rank's process ended",
    "needs": "hardware or a privilege is absent; not counted as passed",
    "blocked": "an exercise before it does not pass",
}


@dataclass(frozen=True)
class Row:
    """An exercise of the class: how many students have which verdict."""

    id: str
    title: str
    points: float
    counts: dict[str, int]
    bar: Markup


@dataclass(frozen=True)
class Card:
    """A misconception as the page shows it: in full, or in a line of a table."""

    number: int
    full: bool
    found: Misconception
    sentence: str
    message: str
    code: list[Line]
    where: str
    guideline: Markup


def write_report(
    folder: Path,
    results: ClassResults,
    folders: Mapping[str, Path],
    histories: Mapping[str, Commits],
    mutants: Sequence[Mutant] = (),
) -> Path:
    """Write ``report.html`` into the results' folder.

    ``folders``: the unpacked submission of each student. ``histories``: the times of each student's
    commits. ``mutants``: the course's wrong implementations, whose mistakes are named.
    """
    path = folder / "report.html"
    write(path, page(results, folders, histories, mutants, load_course()))
    return path


def page(
    results: ClassResults,
    folders: Mapping[str, Path],
    histories: Mapping[str, Commits],
    mutants: Sequence[Mutant],
    course: Course,
) -> str:
    """The report's HTML."""
    graded = results.graded
    config = results.about.get("config", results.about)
    mask = _mask(results, histories, config, course)
    found = misconceptions(graded, course, mutants)
    cards = _cards(found, len(graded), folders, course, mask)
    rows = _rows(graded)
    by_weight = sorted(cards, key=lambda c: found.index(c.found))
    return render(
        "report.html",
        name=mask.text(str(config.get("name") or "class")),
        version=str(results.about.get("course_version") or ""),
        started=moment(results.about.get("started")),
        students=results.students,
        graded=graded,
        problems=Counter(mask.text(s.problem) for s in results.students if s.problem),
        unread=[mask.text(line) for line in results.unread],
        late=sum(s.days_late > 0 for s in graded),
        numbers=_numbers(graded),
        scores=_histogram(graded),
        phases=_by_phase(rows, course),
        verdicts=[(v, MEANING[v], swatch(v)) for v in _told(rows)],
        patterns=patterns(),
        first=[c for c in by_weight if c.found.count >= LEAST][:FIRST],
        cards=[c for c in cards if c.full],
        others=[c for c in cards if not c.full],
        recurring=[(what_they_do(c), n, ids) for c, n, ids in recurring(found)],
        tiers=_tiers(graded),
        labs=_labs(graded),
        time=time_line(
            [histories.get(s.id, Commits()).times for s in results.students],
            [s.submitted for s in results.students if s.submitted],
            moment(config.get("due")),
        ),
        with_code=bool(folders),
        least=LEAST,
    )


def _mask(
    results: ClassResults, histories: Mapping[str, Commits], config: Any, course: Course
) -> Mask:
    """The names of students and teams in the results, the rules and their commits."""
    names = {s.id for s in results.students} | {*histories} | {*config.get("students", ())}
    names |= {*config.get("extensions", ())}
    for team, members in dict(config.get("teams", {})).items():
        names |= {team, *members}
    names |= {p for history in histories.values() for p in history.people}
    return Mask(names, vocabulary(course))


def _numbers(graded: Sequence[Student]) -> dict[str, float] | None:
    """Mean and quartiles in points, and how many students have all or none;
    None without students."""
    if not graded:
        return None
    scores = [s.score for s in graded]
    quartiles = statistics.quantiles(scores, n=4, method="inclusive") if len(scores) > 1 else []
    return {
        "most": max(s.max_score for s in graded),
        "mean": statistics.fmean(scores),
        "median": statistics.median(scores),
        "lower": quartiles[0] if quartiles else scores[0],
        "upper": quartiles[2] if quartiles else scores[0],
        "full": sum(s.score >= s.max_score > 0 for s in graded),
        "none": sum(s.score <= 0 for s in graded),
    }


def _histogram(graded: Sequence[Student]) -> Markup:
    """How many students reached which part of the points."""
    counts = [0] * BINS
    for student in graded:
        counts[min(max(int(student.share * BINS), 0), BINS - 1)] += 1
    labels = [f"{100 * i // BINS}–{100 * (i + 1) // BINS}" for i in range(BINS)]
    line = None
    if graded:
        median = statistics.median(s.share for s in graded)
        line = (min(max(median, 0.0), 1.0), f"median {median:.0%}")
    return columns(
        counts,
        labels,
        what="students",
        below="percent of the points that were to be had",
        line=line,
    )


def _rows(graded: Sequence[Student]) -> list[Row]:
    """A row per exercise, in the order of their ids."""
    verdicts: dict[str, Counter[str]] = {}
    about: dict[str, tuple[str, float]] = {}
    for student in graded:
        for e in student.exercises:
            verdicts.setdefault(e.id, Counter())[e.verdict] += 1
            about.setdefault(e.id, (e.title, e.max_points))
    rows = []
    for each in sorted(verdicts, key=in_order):
        counts = {v: verdicts[each][v] for v in VERDICTS}
        rows.append(Row(each, *about[each], counts, shares(counts)))
    return rows


def _told(rows: Sequence[Row]) -> list[str]:
    """The verdicts that occur, and the three that every reader looks for."""
    asked = ("pass", "fail", "blank")
    return [v for v in VERDICTS if v in asked or any(row.counts[v] for row in rows)]


def _by_phase(rows: Sequence[Row], course: Course) -> list[tuple[str, list[Row]]]:
    """Rows under the titles of their phases. Exercises that the course does not know come last."""
    known = {e.id: e for e in course.exercises}
    grouped: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r.id not in known):
        exercise = known.get(row.id)
        title = f"Phase {exercise.phase.number}: {exercise.phase.title}" if exercise else ""
        grouped.setdefault(title or "Exercises that this course does not have", []).append(row)
    return list(grouped.items())


def _cards(
    found: Sequence[Misconception],
    graded: int,
    folders: Mapping[str, Path],
    course: Course,
    mask: Mask,
) -> list[Card]:
    """Misconceptions by the number of students. In full are only those of several students, and
    those to discuss come first. An exercise's guidelines are quoted once."""
    known: dict[str, Exercise] = {e.id: e for e in course.exercises}
    urgent = [m for m in found if m.count >= LEAST][:FIRST]
    ranked = sorted(found, key=lambda m: -m.count)
    cards: list[Card] = []
    for number, each in enumerate(ranked, 1):
        exercise = known.get(each.exercise)
        full = each.count >= LEAST and (number <= CARDS or each in urgent)
        new = not any(c.guideline and c.found.exercise == each.exercise for c in cards)
        cards.append(
            Card(
                number=number,
                full=full,
                found=each,
                sentence=mask.text(each.sentence(graded)),
                message=mask.text(_usual(each)) if full else "",
                code=snippet(each, folders, course, mask) if full else [],
                where=place_of(exercise) if exercise else "",
                guideline=quoted(exercise) if exercise and new and full else Markup(""),
            )
        )
    return cards


def _usual(found: Misconception) -> str:
    """The message that most students were told; of several such messages, the shortest."""
    told = Counter(w.failed.message for w in found.witnesses)
    return min(told, key=lambda m: (-told[m], len(m), m))


def _labs(graded: Sequence[Student]) -> list[tuple[str, int, float]]:
    """Of each lab how many students handed it in, and the mean share of the points."""
    found: dict[str, list[float]] = {}
    for student in graded:
        for name, share in student.labs.items():
            found.setdefault(name, []).append(share)
    return [(name, len(shares), statistics.fmean(shares)) for name, shares in found.items()]


def _tiers(graded: Sequence[Student]) -> list[tuple[str, dict[str, int]]]:
    """Checks on each tier that passed, failed, or could not run, over all students."""
    totals = {
        tier: {
            word: sum(s.tiers.get(tier, {}).get(word, 0) for s in graded)
            for word in ("pass", "fail", "needs")
        }
        for tier in TIERS
    }
    return [(SHOWN_TIER.get(t, t), counts) for t, counts in totals.items() if any(counts.values())]
