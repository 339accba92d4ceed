"""Whether two runs tell the same: rows with overlapping intervals and the same word."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from . import book
from .common import Table
from .pairs import Paired

TITLE = "Do two runs agree?"
GOAL = 0.9  # of the rows that both have


def counts(tables: Sequence[Paired], first: str, second: str) -> tuple[int, int, int]:
    """Ratios that both runs have; those whose intervals overlap; of these, those with one word."""
    common = overlapping = alike = 0
    for table in tables:
        books = [book.read(run, table) for run in (first, second)]
        for case in table.cases():
            for pair in table.pairs:
                a, b = (each.ratio(case.name, *pair) for each in books)
                if a is None or b is None:
                    continue
                common += 1
                overlap = a.low <= b.high and b.low <= a.high
                overlapping += overlap
                alike += overlap and a.word == b.word
    return common, overlapping, alike


def compared(tables: Sequence[Paired]) -> Table | None:
    """A row for each two runs that have ratios in common."""
    rows = []
    for first, second in itertools.combinations(book.runs(), 2):
        common, overlapping, alike = counts(tables, first, second)
        if common:
            shares = [f"{n} ({n / common:.0%})" for n in (overlapping, alike)]
            rows.append([first, second, str(common), *shares])
    if not rows:
        return None
    header = ["run", "a later run", "ratios in both", "overlapping intervals", "and the same word"]
    note = (
        f"The goal is {GOAL:.0%} in the last column. Names of runs end with a digest of the "
        "machine. Another processor has other ratios, whether the programs are the same or not. "
        "Programs have changed between runs, too."
    )
    return Table(TITLE, header, rows, note)
