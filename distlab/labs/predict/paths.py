"""Quantities of all-reduces whose ranks are not equally busy."""

from __future__ import annotations

from collections.abc import Callable

from .case import Case
from .models import FLOAT
from .scene import Quantity, Seen, bytes_sent


def total(of: Callable[[Case], float], formula: str) -> Quantity:
    """Messages of all ranks."""
    return Quantity(
        name="all_messages",
        asks="messages of all ranks together",
        unit="messages",
        formula=formula,
        value=of,
        answers={
            "ledger": lambda seen: seen.all_messages,
            "clock": lambda seen: float(round(seen.shared / (FLOAT * seen.case["n"]))),
        },
    )


def in_a_row(of: Callable[[Case], float], formula: str) -> Quantity:
    """The longest chain of messages."""
    return Quantity(
        name="rounds",
        asks="messages that follow one another",
        unit="messages",
        formula=formula,
        value=of,
        answers={
            "ledger": lambda seen: max(len(log.events) for log in seen.logs),
            "clock": lambda seen: seen.rounds,
        },
    )


def row_of_bytes(of: Callable[[Case], float], formula: str) -> Quantity:
    """Bytes of the longest chain of messages."""
    return Quantity(
        name="bytes_in_a_row",
        asks="bytes that follow one another",
        unit="bytes",
        formula=formula,
        value=of,
        answers={
            "ledger": lambda seen: max(log.sent + log.received for log in seen.logs),
            "clock": lambda seen: seen.volume,
        },
        tolerance=0.01,
        why="1 %: chunks are whole elements",
    )


def busiest(of: Callable[[Case], float], formula: str, clock: Callable[[Seen], float]) -> Quantity:
    """Bytes of a rank that is not busy all the time: what ``clock`` makes of a run's bytes."""
    return bytes_sent(of, formula, answers={"ledger": lambda seen: seen.sent, "clock": clock})
