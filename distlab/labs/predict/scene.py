"""One prediction: what is asked, the formula, the program, and who answers."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ...grading.implementation import Implementation
from ...hardware.clusters import Cluster
from ...observe.log import Log
from ...ranks.context import RankContext
from ...virtual.reports import VirtualResults
from ...virtual.run import run_virtual
from .case import Case

ASKED = "asked"  # the region of the ledger that the questions are about
Found = dict[str, float]
Work = Callable[[], Found | None]
Prepare = Callable[[RankContext, Implementation, Case], Work]


class Seen:
    """The runs of a case, each made when it is first asked for: ledger, memory and clocks."""

    def __init__(self, run: Callable[[Case, Cluster], VirtualResults], case: Case) -> None:
        self._of, self.case = run, case

    def _run(self, cluster: Cluster) -> VirtualResults:
        return self._of(self.case, cluster)

    def other(self, case: Case) -> Seen:
        """The runs of another case of the same program."""
        return Seen(self._of, case)

    @cached_property
    def real(self) -> VirtualResults:
        """The run on the named cluster."""
        return self._run(self.case.machine)

    @cached_property
    def logs(self) -> list[Log]:
        """The ledgers of all ranks, of what was asked."""
        return [log.select(region=ASKED) for log in self.real.logs]

    @property
    def messages(self) -> float:
        """Messages of the rank that issued most."""
        return max(log.messages for log in self.logs)

    @property
    def all_messages(self) -> float:
        """Messages of all ranks together."""
        return sum(log.messages for log in self.logs)

    @property
    def all_sent(self) -> float:
        """Bytes of all ranks together."""
        return sum(log.sent for log in self.logs)

    @property
    def sent(self) -> float:
        """Bytes of the rank that sent most."""
        return max(log.sent for log in self.logs)

    @property
    def seconds(self) -> float:
        """The virtual clock on the named cluster."""
        return _took(self.real)

    @property
    def by_ledger(self) -> float:
        """Seconds from the first operator's start to the last one's end, as the ledger has them."""
        events = [event for log in self.logs for event in log.events]
        return max(e.end or e.start for e in events) - min(e.start for e in events)

    @cached_property
    def rounds(self) -> float:
        """Messages that followed one another, by the clock of a machine that counts them."""
        return float(round(_took(self._run(self.case.counting()))))

    @cached_property
    def volume(self) -> float:
        """Bytes that followed one another, by the clock of a machine that weighs them."""
        return _took(self._run(self.case.weighing()))

    @cached_property
    def across(self) -> float:
        """Bytes between nodes that followed one another, by the clock of such a machine."""
        return _took(self._run(self.case.crossing()))

    @cached_property
    def shared(self) -> float:
        """Bytes of all ranks, by the clock of a machine on which they share one wire."""
        return _took(self._run(self.case.sharing()))

    @cached_property
    def calls(self) -> float:
        """Collectives that followed one another, by the clock of a machine that counts them."""
        return float(round(_took(self._run(self.case.launching()))))

    def found(self, name: str) -> float:
        """What the ranks measured themselves: the largest."""
        return max(value[name] for value in self.real)


def _took(results: VirtualResults) -> float:
    return max(v["end"] for v in results) - min(v["begin"] for v in results)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number: ``value`` is the formula, ``answers`` are who else knows it.

    ``tolerance``: the share by which a prediction, and the run, may differ from the formula, and
    ``why`` says what it comes from. 0 for what is counted.
    """

    name: str
    asks: str
    unit: str
    formula: str
    value: Callable[[Case], float]
    answers: dict[str, Callable[[Seen], float]]
    tolerance: float = 0.0
    why: str = "none, it is counted"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A prediction for an exercise. ``tells``: the situation, with sizes in braces.

    ``draw`` makes sizes, ``prepare`` sets a rank up and returns the work that is measured.
    ``doubled``: what becomes of the numbers when W doubles, told after the run.
    """

    exercise: str
    tells: str
    draw: Callable[[random.Random], Case]
    prepare: Prepare
    quantities: tuple[Quantity, ...]
    doubled: str = ""
    algorithm: str = field(default="ring")

    def case(self, seed: int) -> Case:
        """The same seed gives the same sizes."""
        return self.draw(random.Random(f"{self.exercise} {seed}"))

    def seen(self, case: Case, impl: Implementation, files: tuple[str, ...]) -> Seen:
        """The runs of ``case`` by an implementation; none has happened yet."""

        def run(one: Case, cluster: Cluster) -> VirtualResults:
            return run_virtual(
                _body,
                one["W"],
                self.prepare,
                impl,
                one,
                cluster=cluster,
                algorithm=self.algorithm,
                learner_files=files,
                timeout=60.0,
            )

        return Seen(run, case)


def _body(ctx: RankContext, prepare: Prepare, impl: Implementation, case: Case) -> Found:
    """One rank: set up, begin together, work; when it began and ended, and what it measured."""
    work = prepare(ctx, impl, case)
    dist.barrier()
    begin = time.monotonic()
    with ctx.region(ASKED):
        found = work() or {}
    return {"begin": begin, "end": time.monotonic(), **found}


@contextlib.contextmanager
def outside(ctx: RankContext) -> Iterator[None]:
    """What happens inside is not asked for."""
    with ctx.region("outside"):
        yield


def clocked(of: Callable[[Case], float], **more: Any) -> Quantity:
    """The time of the run, by its formula and the virtual clock."""
    given: dict[str, Any] = {
        "name": "seconds",
        "asks": "seconds from the first message until the last rank is done",
        "unit": "seconds",
        "value": of,
        "answers": {"ledger": lambda seen: seen.by_ledger, "clock": lambda seen: seen.seconds},
        "tolerance": 0.03,
        "why": "3 %: chunks are whole elements, and a rank needs time to read its clock",
    }
    return Quantity(**given | more)


def bytes_sent(of: Callable[[Case], float], formula: str, **more: Any) -> Quantity:
    """The bytes of the busiest rank, by its formula, the ledger and a clock that weighs bytes."""
    given: dict[str, Any] = {
        "name": "bytes",
        "asks": "bytes that the busiest rank sends",
        "unit": "bytes",
        "formula": formula,
        "value": of,
        "answers": {"ledger": lambda seen: seen.sent, "clock": lambda seen: seen.volume},
        "tolerance": 0.01,
        "why": "1 %: chunks are whole elements",
    }
    return Quantity(**given | more)


def messages(of: Callable[[Case], float], formula: str, **more: Any) -> Quantity:
    """The messages of the busiest rank, by its formula, the ledger and a clock that counts them."""
    given: dict[str, Any] = {
        "name": "messages",
        "asks": "messages that the busiest rank sends",
        "unit": "messages",
        "formula": formula,
        "value": of,
        "answers": {
            "ledger": lambda seen: seen.messages,
            "clock": lambda seen: seen.rounds,
        },
    }
    return Quantity(**given | more)


def collectives(of: Callable[[Case], float], formula: str, **more: Any) -> Quantity:
    """The collectives of a rank, by formula, ledger, and a clock that counts them."""
    given: dict[str, Any] = {
        "name": "collectives",
        "asks": "collectives that a rank calls",
        "unit": "collectives",
        "formula": formula,
        "value": of,
        "answers": {"ledger": lambda seen: seen.messages, "clock": lambda seen: seen.calls},
    }
    return Quantity(**given | more)


def held(
    name: str, of: Callable[[Case], float], formula: str, by: str = "memory", **more: Any
) -> Quantity:
    """What the ranks find themselves, as ``name``, and ``by`` what; in bytes unless told."""
    given: dict[str, Any] = {
        "name": name,
        "unit": "bytes",
        "formula": formula,
        "value": of,
        "answers": {by: lambda seen: seen.found(name)},
    }
    return Quantity(**given | more)


def bottleneck(seconds: Callable[[Case], float]) -> Quantity:
    """What takes most of the ``seconds`` with twice as many ranks."""

    def latency(whole: float, without_bytes: float) -> float:
        return float(without_bytes > whole / 2)

    return Quantity(
        name="bottleneck",
        asks="with twice as many ranks: what takes more than half of the time",
        unit="latency or bytes",
        formula="latency, if more than half of the time stays where bytes take none",
        value=lambda c: latency(seconds(c.doubled()), seconds(c.doubled(quick=True))),
        answers={
            "clock": lambda seen: latency(
                seen.other(seen.case.doubled()).seconds,
                seen.other(seen.case.doubled(quick=True)).seconds,
            )
        },
        why="none, it is one of two",
    )


def ring_seconds(case: Case, nbytes: float, ranks: int | None = None) -> float:
    """An all-reduce of the backend by a ring of ``ranks`` (default: of all)."""
    w = ranks or case["W"]
    return case.machine.launch + 2 * (w - 1) * (case.alpha + nbytes / w * case.beta)


def half_seconds(case: Case, nbytes: float) -> float:
    """A reduce-scatter of ``nbytes``, or an all-gather to ``nbytes``, by a ring."""
    w = case["W"]
    return case.machine.launch + (w - 1) * (case.alpha + nbytes / w * case.beta)
