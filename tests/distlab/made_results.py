"""A made results folder, as ``distlab class grade`` writes it, for tests of what is made of it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.classes.outcomes import load_results
from distlab.classes.report import write_report
from distlab.classes.repository import Commits
from distlab.course.catalogue import load_course
from distlab.grading.wrong import Mutant

Told = Mapping[str, Any]


def passed(exercise: str) -> dict[str, Any]:
    """An exercise with all its points."""
    return entry(exercise, "pass", [{"name": "test_it", "verdict": "pass", "title": "It is right"}])


def failed(
    exercise: str,
    cause: str,
    check: str = "test_it",
    title: str = "It is right",
    message: str = "expected 1, got 2",
    line: str = "",
    verdict: str = "fail",
) -> dict[str, Any]:
    """An exercise with one failing check."""
    told = {"cause": cause, "name": check, "title": title, "message": message, "line": line}
    return entry(exercise, verdict, [{"verdict": verdict, **told}])


def entry(exercise: str, verdict: str, checks: Sequence[Told] = ()) -> dict[str, Any]:
    """An exercise as the report of a run has it; the title of an unknown one is made up."""
    known = {e.id: e for e in load_course().exercises}
    points = known[exercise].points if exercise in known else 7
    return {
        "id": exercise,
        "title": known[exercise].title if exercise in known else "Another exercise",
        "verdict": verdict,
        "points": points if verdict == "pass" else 0,
        "max_points": points,
        "checks": [{"tier": "virtual", "rank": 0, **c} for c in checks],
    }


def made_results(folder: Path, class_: Mapping[str, Sequence[Told]], **about: Any) -> Path:
    """The folder, with each student's exercises; ``about``: what class.json says of the rules."""
    (folder / "students").mkdir(parents=True)
    facts = {"course_version": "1.2.3", "started": "2026-03-17T01:00:00+00:00", "config": about}
    (folder / "class.json").write_text(json.dumps(facts))
    for student, exercises in class_.items():
        write_result(folder, student, exercises)
    return folder


def write_result(folder: Path, student: str, exercises: Sequence[Told], **more: Any) -> None:
    """One student's result.json."""
    data = {
        "schema": 1,
        "student": student,
        "course_version": "1.2.3",
        "submission_hash": "sha256:0",
        "submitted": None,
        "graded": "2026-03-17T01:00:00+00:00",
        "late": {"days": 0, "penalty_percent": 0},
        "score": sum(e["points"] for e in exercises),
        "max_score": sum(e["max_points"] for e in exercises),
        "problem": "",
        "tiers": {"virtual": {"pass": 3, "fail": 1, "needs": 0}},
        "phases": [{"phase": 1, "exercises": list(exercises)}],
        "attempt": 1,
    }
    path = folder / "students" / student / "result.json"
    path.parent.mkdir()
    path.write_text(json.dumps(data | more))


def told(
    folder: Path,
    folders: Mapping[str, Path] | None = None,
    histories: Mapping[str, Commits] | None = None,
    mutants: tuple[Mutant, ...] = (),
) -> str:
    """The page that is written."""
    found = load_results(folder)
    path = write_report(folder, found, folders or {}, histories or {}, mutants)
    return path.read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """What a reader reads, spaces folded."""
    visible = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return " ".join(html.unescape(visible).split())
