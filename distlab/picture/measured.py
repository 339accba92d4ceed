"""One number of a run: how long it took, or the share of its time that an exercise is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .spans import WAIT, Span, covered, idle_share


class Quantity(NamedTuple):
    """A number that a run has: how it is told, what it tells, and how spans give it."""

    says: str
    tells: str
    of: Callable[[Sequence[Span]], float]


def milliseconds(spans: Sequence[Span]) -> float:
    """From the first begin to the last end over all ranks."""
    return 1e3 * (max(s.end for s in spans) - min(s.start for s in spans))


def hidden(spans: Sequence[Span]) -> float:
    """The percent of the time of communication in which the same rank computed as well."""
    moving = both = 0.0
    for rank in {span.rank for span in spans}:
        mine = [span for span in spans if span.rank == rank]
        moves = [span for span in mine if span.lane == "communication"]
        others = [span for span in mine if span.lane != "communication"]
        moving += covered(moves)
        both += covered(moves) + covered(others) - covered(mine)
    return 100 * both / moving if moving else 0.0


def waiting(spans: Sequence[Span]) -> float:
    """The percent of the time of all ranks that they waited for another rank."""
    ranks = {span.rank for span in spans}
    waits = sum(covered(s for s in spans if s.rank == r and s.name == WAIT) for r in ranks)
    return 1e5 * waits / (len(ranks) * milliseconds(spans))


def bubble(spans: Sequence[Span]) -> float:
    """The percent of the time of all stages that they are idle."""
    return 100 * idle_share([span for span in spans if span.label] or spans)


QUANTITIES = {
    "time": Quantity("the run takes {} ms", "how long the run takes", milliseconds),
    "hidden": Quantity(
        "{} % of the communication is hidden behind compute",
        "which share of the communication is hidden behind compute",
        hidden,
    ),
    "waiting": Quantity(
        "ranks wait for other ranks during {} % of the time",
        "which share of the time ranks wait for other ranks",
        waiting,
    ),
    "bubble": Quantity(
        "stages are idle during {} % of the time",
        "which share of the time stages are idle",
        bubble,
    ),
}
