"""Goals of paired tables: how large a ratio may be, and what was tried where it is larger.

``goals.toml`` names for each goal the table's title, the two contestants, and the largest upper end
of the interval. A goal holds for all rows, or for those that have one of ``rows`` among their
labels. Where the newest run misses a goal, it must name at least two attempts with their numbers,
and say why the rest stays: a test asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distlab.host.toml import tomllib

from .book import Book
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

    def missed(self, table: Paired, book: Book) -> tuple[list[Case], int]:
        """The measured rows that miss the goal, and the number of rows that were measured."""
        pairs = [(c, book.ratio(c.name, self.ours, self.theirs)) for c in self.cases(table)]
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
    lists = ("rows", "tried")
    return tuple(
        Goal(**{k: tuple(v) if k in lists else v for k, v in each.items()})
        for each in tomllib.loads(text)["goal"]
    )


def in_words(table: Paired, book: Book) -> Iterator[str]:
    """A paragraph for each goal of a table: how many rows reach it, attempts, the reason."""
    for goal in goals():
        if goal.table != table.title:
            continue
        missed, measured = goal.missed(table, book)
        rows = f" in rows with {', '.join(goal.rows)}" if goal.rows else ""
        words = (
            f"Goal: the upper end of {goal.ours} : {goal.theirs} is at most {goal.most:g}{rows}. "
            f"{measured - len(missed)} of {measured} rows reach it."
        )
        if missed and goal.tried:
            attempts = " ".join(f"({n}) {each}" for n, each in enumerate(goal.tried, 1))
            words += f" Tried: {attempts} {goal.stays}"
        yield words
