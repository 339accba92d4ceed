"""Goals of paired tables: how large a ratio may be, and what was tried where it is larger.

``goals.toml`` names for each goal the table's title, the two contestants, and the largest upper end
of the interval. A goal holds for all rows, or for those that have one of ``rows`` among their
labels. Where the newest run misses a goal, it must name at least two attempts with their numbers,
and say why the rest stays: a test asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distlab.host.toml import tomllib

from .book import Book, newest
from .pairs import Case, Paired

LEAST_ATTEMPTS = 2


@dataclass(frozen=True)
class Goal:
    """The upper end of the interval of ``ours`` to ``theirs`` is at most ``most``.

    ``tried``: sentences about attempts, with their numbers. ``stays``: why no more was reached.
    """

    table: str
    ours: str
    theirs: str
    most: float
    rows: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    stays: str = ""

    def cases(self, table: Paired) -> list[Case]:
        """The rows that the goal is for."""
        return [c for c in table.cases() if not self.rows or {*self.rows} & {*c.labels}]

    def missed(self, table: Paired, books: Sequence[Book]) -> tuple[list[Case], int]:
        """The rows that miss the goal, and the number of rows that were measured; of ``books``,
        oldest first, a row's newest one counts."""
        pairs = [
            (case, newest(books, case).ratio(case.name, self.ours, self.theirs))
            for case in self.cases(table)
        ]
        known = [(case, ratio.high) for case, ratio in pairs if ratio is not None]
        return [case for case, high in known if high > self.most], len(known)

    @property
    def explained(self) -> bool:
        """Whether there are enough attempts, each with a number, and a reason."""
        with_numbers = [each for each in self.tried if any(c.isdigit() for c in each)]
        return bool(self.stays) and len(with_numbers) >= LEAST_ATTEMPTS


@cache
def goals() -> tuple[Goal, ...]:
    """All goals."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = tomllib.loads(text)["goal"]
    lists = ("rows", "tried")
    return tuple(
        Goal(**each | {name: tuple(each.get(name, ())) for name in lists}) for each in found
    )


def in_words(table: Paired, books: Sequence[Book]) -> Iterator[str]:
    """A paragraph for each goal of a table: how many rows reach it, attempts, the reason."""
    for goal in goals():
        if goal.table != table.title:
            continue
        missed, measured = goal.missed(table, books)
        rows = f" in rows with {' or '.join(goal.rows)}" if goal.rows else ""
        words = (
            f"Goal: the upper end of {goal.ours} : {goal.theirs} is at most {goal.most:.2f}{rows}. "
            f"It is so in {measured - len(missed)} of {measured} rows."
        )
        if missed and goal.tried:
            attempts = "\n".join(f"- {each}" for each in goal.tried)
            words += f" Tried:\n\n{attempts}\n\n{goal.stays}"
        yield words
