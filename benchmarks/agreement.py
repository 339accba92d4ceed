"""Whether two runs tell the same: rows with overlapping intervals and the same word."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from . import book
from .common import Table
from .pairs import Paired
from .ratio import Ratio

Ratios = Mapping[tuple[str, ...], Ratio]  # by table, case and contestants
TITLE = "Do two runs agree?"
GOAL = 0.9  # of the rows that both have


def ratios(tables: Sequence[Paired], run: str) -> Ratios:
    """All that a run has of these tables."""
    return {
        (table.title, case.name, *pair): ratio
        for table in tables
        for found in [book.read(run, table)]
        for case in table.cases()
        for pair in table.pairs
        if (ratio := found.ratio(case.name, *pair)) is not None
    }


def counts(first: Ratios, second: Ratios) -> tuple[int, int, int, int]:
    """Ratios that both runs have; those whose intervals overlap; of these, those with one word;
    those that one run calls faster and the other one slower."""
    both = [(first[key], second[key]) for key in first.keys() & second.keys()]
    overlapping = [(a, b) for a, b in both if a.low <= b.high and b.low <= a.high]
    alike = sum(a.word == b.word for a, b in overlapping)
    opposite = sum({a.word, b.word} == {"faster", "slower"} for a, b in both)
    return len(both), len(overlapping), alike, opposite


def compared(tables: Sequence[Paired]) -> Table | None:
    """A row for each two runs that have ratios in common."""
    rows = []
    of_runs = {run: ratios(tables, run) for run in book.runs()}
    for first, second in itertools.combinations(of_runs, 2):
        common, *found = counts(of_runs[first], of_runs[second])
        if common:
            shares = [f"{n} ({n / common:.0%})" for n in found]
            rows.append([first, second, str(common), *shares])
    if not rows:
        return None
    header = ["run", "a later run", "ratios in both", "overlapping intervals", "and the same word"]
    header += ["faster once, slower once"]
    note = (
        f"The goal is {GOAL:.0%} with overlapping intervals and the same word. Names of runs end "
        "with a digest of the machine. Another processor has other ratios, whether the programs "
        "are the same or not. Programs have changed between runs, too."
    )
    return Table(TITLE, header, rows, note)
