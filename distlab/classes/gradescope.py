"""results.json for Gradescope, made from a student's result by its documented fields.

There is one test for each exercise, with the points that it has in the class. Its text tells check
by check what came out. All texts are plain: a message that learner code writes is never read as
HTML or Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..course.catalogue import load_course
from ..grading.report import LIKELY
from ..grading.verdicts import SHOWN_TIER
from .config import ClassConfig

FORMATS = {"output_format": "text", "test_output_format": "text", "test_name_format": "text"}
NO_RESULT = (
    "The autograder was ended before it had a result. Submit again; if this comes back, tell your "
    "instructor: more time or memory may be needed."
)
BROKEN = "The autograder itself failed. This is not your mistake: tell your instructor."


def no_result(text: str) -> dict[str, Any]:
    """A result without any test: the text that the student reads instead."""
    return {"score": 0, "output": text, "stdout_visibility": "hidden", **FORMATS, "tests": []}


def results(student: Mapping[str, Any], config: ClassConfig) -> dict[str, Any]:
    """results.json of a student's result, as docs/schema/student.schema.json describes it."""
    rules = config.gradescope
    exercises = [e for phase in student["phases"] for e in phase["exercises"]]
    found = {
        "score": student["score"],
        "execution_time": round(sum(e["seconds"] for e in exercises), 1),
        "output": "\n".join(_about(student)),
        **FORMATS,
        "visibility": rules.visibility,
        "stdout_visibility": rules.stdout,
        "extra_data": {
            "course_version": student["course_version"],
            "submission_hash": student["submission_hash"],
            "seeds": {str(phase["phase"]): phase["seed"] for phase in student["phases"]},
            "tiers": student["tiers"],
        },
        "tests": [_test(e, config) for e in exercises],
    }
    if rules.leaderboard:
        passed = sum(count["pass"] for count in student["tiers"].values())
        points = {"name": "Points", "value": student["score"]}
        found["leaderboard"] = [points, {"name": "Checks passed", "value": passed}]
    return found


def _about(student: Mapping[str, Any]) -> Iterator[str]:
    yield f"{student['score']:g} of {student['max_score']:g} points"
    if student["problem"]:
        yield f"not graded: {student['problem']}"
    late = student["late"]
    if late["days"]:
        costs = f"{late['penalty_percent']:g} % of the points"
        yield f"late: {late['days']:g} days, which costs {costs}"
    seeds = ", ".join(f"phase {p['phase']} with seed {p['seed']}" for p in student["phases"])
    yield f"course version {student['course_version']}" + (f"; {seeds}" if seeds else "")


def _test(exercise: Mapping[str, Any], config: ClassConfig) -> dict[str, Any]:
    rules = config.gradescope
    worth = config.worth(load_course().exercise(exercise["id"]))
    hidden = exercise["id"] in rules.hidden
    return {
        "score": round(worth * exercise["points"] / exercise["max_points"], 2),
        "max_score": worth,
        "status": "passed" if exercise["verdict"] == "pass" else "failed",
        "name": exercise["title"],
        "number": exercise["id"],
        "output": "\n".join(_text(exercise)),
        "tags": [exercise["verdict"]],
        "visibility": rules.hidden_until if hidden else rules.visibility,
        "extra_data": {
            "verdict": exercise["verdict"],
            "checks": [{k: c[k] for k in ("name", "verdict", "cause")} for c in exercise["checks"]],
        },
    }


def _text(exercise: Mapping[str, Any]) -> Iterator[str]:
    """The exercise check by check. Checks with the same words and verdict are told once."""
    yield f"{exercise['verdict']}: {exercise['points']} of {exercise['max_points']} points"
    if exercise["used_solution_of"] and exercise["verdict"] not in ("blank", "blocked", "error"):
        yield f"graded with the solution of {', '.join(exercise['used_solution_of'])}"
    told: dict[tuple[str, ...], list[str]] = {}
    for check in exercise["checks"]:
        if check["verdict"] in ("blank", "blocked", "needs", "error"):
            told.setdefault((check["verdict"], "", *_why(check)), []).append(check["tier"])
        else:
            key = check["verdict"], check["title"] or check["name"], *_why(check)
            told.setdefault(key, []).append(check["tier"])
    for (verdict, title, *why), tiers in told.items():
        names = ", ".join(dict.fromkeys(SHOWN_TIER.get(tier, tier) for tier in tiers))
        count = f"{len(tiers)} checks" if len(tiers) > 1 else "1 check"
        yield f"{verdict:<8} {title or count} ({names})"
        yield from (f"    {line}" for part in why for line in part.splitlines())
    if exercise["verdict"] != "pass":
        yield f"a hint, in your own copy of the course: distlab hint {exercise['id']}"


def _why(check: Mapping[str, Any]) -> tuple[str, ...]:
    """The message of a check that did not pass, in the words of the grader's own report."""
    if check["verdict"] == "pass":
        return ()
    parts = [check["message"]]
    if check["cause"] in LIKELY:
        parts.append(f"likely cause: {LIKELY[check['cause']]}")
    if check["line"]:
        parts.append(f"your line: {check['line']}")
    return tuple(filter(None, parts))
