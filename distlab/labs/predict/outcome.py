"""What became of predictions: each beside the formula and the run; and all that there were."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...course import progress
from ...course.catalogue import root
from ...host.terminal import short
from .answers import CHOICES

ROUND = 10  # predictions that one point of the curve looks back on
LEAST = 1e-30


@dataclass(frozen=True)
class Outcome:
    """One predicted number. ``answers``: of ledger, memory, links and clock, as far as they know.

    ``tolerance`` and ``why`` belong to the formula. ``timed``: it rests on the α-β model.
    """

    lab: str
    name: str
    asks: str
    unit: str
    predicted: float
    formula: str
    value: float
    tolerance: float
    why: str
    answers: dict[str, float] = field(default_factory=dict)
    timed: bool = False

    @property
    def right(self) -> bool:
        """Whether the prediction is as close to the formula as the formula is to the run."""
        return agree(self.predicted, self.value, self.tolerance)

    @property
    def confirmed(self) -> bool:
        """Whether the run gave what the formula says."""
        return all(agree(each, self.value, self.tolerance) for each in self.answers.values())

    @property
    def factor(self) -> float:
        """How far off: 1 is right, 2 is twice or half of it."""
        if self.unit in CHOICES:
            return 1.0 if self.right else 2.0
        a, b = max(self.predicted, LEAST), max(self.value, LEAST)
        return max(a / b, b / a)

    def row(self) -> dict[str, object]:
        """Plain data."""
        more = {"right": self.right, "confirmed": self.confirmed, "factor": self.factor}
        return asdict(self) | more


def agree(got: float, wanted: float, tolerance: float) -> bool:
    """Whether two numbers differ by at most this share of the second one."""
    return abs(got - wanted) <= tolerance * abs(wanted) + 1e-9 * abs(wanted) + 1e-15


def kept_file() -> Path:
    """Where past predictions lie."""
    return root() / ".distlab" / "predictions.json"


def kept() -> list[dict[str, float]]:
    """Past predictions, oldest first: how far off each was. ValueError if the file is damaged."""
    path = kept_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [{**each, "factor": float(each["factor"])} for each in data]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        text = f"{short(path)} is damaged: move it away, and new predictions begin a new one"
        raise ValueError(text) from None


def keep(outcomes: Sequence[Outcome]) -> None:
    """Add to the file; a crash leaves the old one."""
    data = list[object](kept())
    data += [{"lab": o.lab, "name": o.name, "right": o.right, "factor": o.factor} for o in outcomes]
    progress.write(kept_file(), data)


@dataclass(frozen=True)
class Point:
    """After so many predictions: of the last ten the share that was right, the median factor."""

    count: int
    right: float
    factor: float


def curve(past: Sequence[dict[str, float]]) -> list[Point]:
    """How good predictions have become: a point per prediction."""
    points = []
    for count in range(1, len(past) + 1):
        last = past[max(0, count - ROUND) : count]
        right = sum(bool(each["right"]) for each in last) / len(last)
        logs = [math.log(each["factor"]) for each in last]
        points.append(Point(count, right, math.exp(statistics.median(logs))))
    return points
