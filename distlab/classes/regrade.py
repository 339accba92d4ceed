"""Grade again after a change of checks, and show whose points change, and why,
before anything is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOOD = ("pass", "needs")


@dataclass(frozen=True)
class Change:
    """The change for a student: the points before and after, and one line for each reason."""

    student: str
    before: float
    after: float
    reasons: tuple[str, ...]


def beside(out: Path) -> Path:
    """Where the new results lie until they are accepted."""
    return out.with_name(f"{out.name}.regraded")


def changes(before: Path, after: Path) -> list[Change]:
    """The students whose points or verdicts differ between two folders of results."""
    old, new = _results(before), _results(after)
    found = []
    for student in sorted({*old, *new}):
        one, two = old.get(student, {}), new.get(student, {})
        reasons = tuple(_reasons(one, two))
        scores = one.get("score", 0), two.get("score", 0)
        if reasons or scores[0] != scores[1]:
            found.append(Change(student, *scores, reasons or tuple(_rules(one, two))))
    return found


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(folder.glob("students/*/result.json"))
    return {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _reasons(one: dict[str, Any], two: dict[str, Any]) -> Iterator[str]:
    """A line for each exercise whose verdict or points differ, with the checks behind it."""
    if one.get("problem", "") != two.get("problem", ""):
        yield f"{one.get('problem') or 'graded'} → {two.get('problem') or 'graded'}"
    for name, points in _labs(two).items():
        if _labs(one).get(name, points) != points:
            yield f"lab {name}: {_labs(one)[name]:g} → {points:g}"
    old, new = _exercises(one), _exercises(two)
    for number in {**old, **new}:
        was, now = old.get(number), new.get(number)
        if was is None or now is None:
            yield f"{number}: graded only {'before' if now is None else 'now'}"
        elif (was["verdict"], was["points"]) != (now["verdict"], now["points"]):
            head = f"{number}: {was['verdict']} {was['points']} → {now['verdict']} {now['points']}"
            yield "; ".join([head, *_checks(was, now)])


def _exercises(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {e["id"]: e for phase in result.get("phases", ()) for e in phase["exercises"]}


def _labs(result: dict[str, Any]) -> dict[str, float]:
    """Points by the names of labs; results of an older version have none."""
    return {lab["name"]: lab["points"] for lab in result.get("labs", ())}


def _checks(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """The checks that fail only now and those that fail no more, each with its cause."""
    old, new = _failing(was), _failing(now)
    for title in (t for t in new if t not in old):
        yield f"now fails: {title}{new[title]}"
    for title in (t for t in old if t not in new):
        yield f"fails no more: {title}{old[title]}"


def _failing(exercise: dict[str, Any]) -> dict[str, str]:
    return {
        check.get("title") or check["name"]: f" ({check['cause']})" if check["cause"] else ""
        for check in exercise["checks"]
        if check["verdict"] not in (*GOOD, "blocked")
    }


def _rules(one: dict[str, Any], two: dict[str, Any]) -> Iterator[str]:
    """The reasons why points differ although no verdict does."""
    if one.get("late") != two.get("late"):
        days = [result.get("late", {}).get("days", 0) for result in (one, two)]
        yield f"late: {days[0]} → {days[1]} days"
    if one.get("attempt") != two.get("attempt"):
        yield f"another submission counts: {one.get('attempt')} → {two.get('attempt')}"
    if one.get("max_score") != two.get("max_score"):
        yield f"points to be had: {one.get('max_score')} → {two.get('max_score')}"


def accept(out: Path) -> Path:
    """Put the new results in the place of the old ones; returns where the old ones are now."""
    number = 1
    while (kept := out.with_name(f"{out.name}.before-{number}")).exists():
        number += 1
    out.rename(kept)
    beside(out).rename(out)
    return kept
