"""The common parts of benchmarks: a table of results, and medians of runs taken in turn."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Table:
    """One benchmark's result, as it stands in benchmarks/README.md."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """The table with its title and note."""
        lines = [f"## {self.title}", "", *([self.note, ""] if self.note else [])]
        lines += ["| " + " | ".join(self.header) + " |"]
        lines += ["|" + " --- |" * len(self.header)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines)


def now(device: torch.device) -> float:
    """The clock in seconds, read when all GPU work of this process is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def failed(error: BaseException, where: str = "") -> dict[str, Any]:
    """The text that a part of ``distlab doctor --cuda`` prints for an exception,
    in place of its result."""
    first, *_ = str(error).strip().splitlines() or [""]
    message = f"{where}{type(error).__name__}: {first}"
    said = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"status": "failed", "message": message, "result": {"said": said}}


def seconds(fn: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    begun = time.perf_counter()
    fn()
    return time.perf_counter() - begun


def in_turn(contestants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each contestant's values, one per round, so that a busy moment hits all contestants."""
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, measure in contestants.items():
            values[name].append(measure())
    return values


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``"0.10 (0.09 … 0.12)"``: median, least and most."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"
