"""The common parts of benchmarks: a table of results, and medians of runs taken in turn."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


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


def turns(names: Iterable[str], rounds: int, number: int = 0) -> Iterator[str]:
    """The names, ``rounds`` times, forwards and backwards in turn: who comes after whom leaves its
    traces in caches and sockets. ``number``: of the start; odd ones begin backwards."""
    order = [*names]
    for index in range(number, number + rounds):
        yield from reversed(order) if index % 2 else order


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int, number: int = 0
) -> dict[str, list[float]]:
    """Each contestant's values, one per round, so that a busy moment hits all contestants."""
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for name in turns(contestants, rounds, number):
        values[name].append(contestants[name]())
    return values


def on_slowest_rank(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, number: int = 0
) -> dict[str, list[float]]:
    """Seconds of each call in each round, on the slowest rank; all ranks begin a call together."""

    def timed(call: Callable[[], object]) -> float:
        dist.barrier()
        begun = now(device)
        call()
        return now(device) - begun

    taken = in_turn({name: partial(timed, call) for name, call in calls.items()}, rounds, number)
    slowest = torch.tensor([*taken.values()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(taken, slowest.tolist(), strict=True))


def milliseconds(taken: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The same values, which are seconds, in milliseconds."""
    return {name: [1e3 * s for s in values] for name, values in taken.items()}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``"0.10 (0.09 … 0.12)"``: median, least and most."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"
