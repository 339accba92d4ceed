"""A reviewer's answer, from options, a file or questions, and what it earns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...grading.contract import AXES
from ..frame import Part, read_toml
from .change import faults
from .chosen import Review

APPROVE, REFUSE = "approve", "refuse"
FIELDS = {"verdict", "line", "axis"}
VERDICT, LINE, AXIS = 0.5, 0.3, 0.2  # shares of the points for a defect that was found
FALSE_ALARM, MISSED = -0.5, -1.0  # what is merged costs more than what is asked for twice


@dataclass(frozen=True)
class Answer:
    """``approve``, or the line and the axis of the defect."""

    approve: bool
    line: int = 0
    axis: str = ""


def answer_of(fields: Mapping[str, Any], source: str) -> Answer:
    """The answer in these fields; ValueError with one line that names the field and ``source``."""
    unknown = sorted({*fields} - FIELDS)
    if unknown:
        raise ValueError(f"{source}: there is no field {unknown[0]!r}, only verdict, line and axis")
    verdict = fields.get("verdict")
    if verdict == APPROVE:
        return Answer(True)
    if verdict != REFUSE:
        raise ValueError(f"{source}: verdict must be {APPROVE!r} or {REFUSE!r}, got {verdict!r}")
    line, axis = fields.get("line"), fields.get("axis")
    if type(line) is not int or line == 0:
        raise ValueError(
            f"{source}: line must be a number of the right column, or minus one of the left for a "
            f"line that is taken away; got {line!r}"
        )
    if axis not in AXES:
        raise ValueError(f"{source}: axis must be one of {', '.join(AXES)}; got {axis!r}")
    return Answer(False, line, axis)


def read_answer(path: Path) -> Answer:
    """The answer in a file."""
    return answer_of(read_toml(path), path.name)


def asked(ask: Callable[[str], str]) -> Answer:
    """The answer to questions; ValueError if the input ends before."""
    try:
        fields: dict[str, Any] = {"verdict": ask(f"{APPROVE} or {REFUSE}? ").strip()}
        if fields["verdict"] == REFUSE:
            line = ask("line (minus for one that is taken away)? ").strip()
            fields["line"] = int(line) if re.fullmatch(r"-?\d{1,6}", line) else line
            fields["axis"] = ask("axis? ").strip()
    except EOFError:
        raise ValueError("the answer ended before all was said: nothing is graded") from None
    return answer_of(fields, "the answer")


def graded(review: Review, answer: Answer) -> list[Part]:
    """What the answer earns; the parts add up to the review's points, whatever kind it is of."""
    most = review.points
    if review.mutant is None:
        if answer.approve:
            return [Part("verdict", most, most, f"The change is harmless. {review.why}")]
        text = f"A false alarm: the change is harmless. {review.why}"
        return [Part("verdict", FALSE_ALARM * most, most, text)]
    where, axes = sorted(faults(review)), " or ".join(review.axes)
    if answer.approve:
        return [Part("verdict", MISSED * most, most, f"A defect was merged ({axes}). {review.why}")]
    line_right, axis_right = answer.line in where, answer.axis in review.axes
    numbers = ", ".join(map(str, where))
    return [
        Part("verdict", VERDICT * most, VERDICT * most, f"There is a defect. {review.why}"),
        Part("line", LINE * most * line_right, LINE * most, f"It is at line {numbers}."),
        Part("axis", AXIS * most * axis_right, AXIS * most, f"{axes}: {AXES[review.axes[0]]}."),
    ]
