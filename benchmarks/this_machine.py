"""Predictions for this machine beside measurements: the record, and what the pages show of it.

``python -m benchmarks.run validation`` measures and writes ``this_machine.json``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from distlab.course.catalogue import root

FILE = root() / "benchmarks" / "this_machine.json"
MEDIAN, WORST = 0.10, 0.25  # goals
HEADER = ("program", "predictions", "median error", "worst", "where")


@dataclass(frozen=True)
class Point:
    """One prediction beside its measurement, in seconds, of the round whose error is the median of
    all rounds' ``errors``. A round calibrates anew, and measures ``starts`` fresh starts."""

    what: str
    ranks: int
    measured: float
    predicted: float
    starts: int
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """Relative: positive if the prediction is too slow."""
        return self.predicted / self.measured - 1

    @property
    def program(self) -> str:
        """The part of ``what`` that names the program."""
        return self.what.split(",")[0]


@dataclass(frozen=True)
class Record:
    """``machine``, in words; ``calibrated``: the numbers of the cluster, in words."""

    machine: str
    date: str
    calibrated: str
    points: tuple[Point, ...]


def read() -> Record | None:
    """The record, if this machine was measured."""
    if not FILE.is_file():
        return None
    data = json.loads(FILE.read_text(encoding="utf-8"))
    points = (Point(**point | {"errors": tuple(point["errors"])}) for point in data["points"])
    return Record(**data | {"points": tuple(points)})


def write(record: Record) -> None:
    """Keep the record."""
    FILE.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def middle(same: Sequence[Point]) -> Point:
    """The point of the round whose error is the median; with all rounds' errors."""
    ordered = sorted(same, key=lambda point: point.error)
    return replace(ordered[len(same) // 2], errors=tuple(point.error for point in same))


def by_program(points: Sequence[Point]) -> list[list[str]]:
    """A row of errors for each program, and one for all."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.program, []).append(point)
    groups["all of them"] = list(points)
    rows = []
    for name, members in groups.items():
        worst = max(members, key=lambda p: abs(p.error))
        where = f"{worst.what}, {ranks(worst.ranks)}: {worst.measured * 1e3:.3g} ms measured"
        median = statistics.median(abs(p.error) for p in members)
        rows.append([name, str(len(members)), f"{median:.0%}", f"{worst.error:+.0%}"])
        rows[-1].append(f"{where}, {worst.predicted * 1e3:.3g} ms predicted")
    return rows


def all_points(points: Sequence[Point]) -> list[list[str]]:
    """A row for each prediction."""
    return [
        [
            p.what,
            str(p.ranks),
            f"{p.measured * 1e3:.3g}",
            f"{p.predicted * 1e3:.3g}",
            f"{p.error:+.0%}",
            f"{min(p.errors):+.0%} … {max(p.errors):+.0%}",
        ]
        for p in points
    ]


def ranks(count: int) -> str:
    """The number of ranks in words."""
    return "1 rank" if count == 1 else f"{count} ranks"


def verdict(points: Sequence[Point]) -> str:
    """Whether the goals are met, in a sentence."""
    median = statistics.median(abs(p.error) for p in points)
    worst = max(abs(p.error) for p in points)
    met = median <= MEDIAN and worst <= WORST
    words = "met" if met else "not met"
    return (
        f"The goals are a median of {MEDIAN:.0%} and a worst of {WORST:.0%}; they are {words}: "
        f"{median:.0%} and {worst:.0%}."
    )
