"""Whether two runs tell the same: rows with overlapping intervals and the same word."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from . import book
from .common import Table
from .pairs import Paired
from .ratio import Ratio, over_starts

Key = tuple[str, ...]  # table, case and contestants
Ratios = Mapping[Key, Ratio]
Starts = Mapping[Key, Sequence[float]]
TITLE = "Do two runs agree?"
GOAL = 0.9  # of the rows that both have
DRAWS = 200  # of a row's starts


def starts(tables: Sequence[Paired], run: str) -> Starts:
    """The ratios of all starts that a run has of these tables."""
    return {
        (table.title, case.name, *pair): ratios
        for table in tables
        for found in [book.read(run, table)]
        for case in table.cases()
        for pair in table.pairs
        if (ratios := found.of_starts(case.name, *pair))
    }


def overlap(first: Ratio, second: Ratio) -> bool:
    """Whether their intervals have a number in common."""
    return first.low <= second.high and second.low <= first.high


def counts(first: Ratios, second: Ratios) -> tuple[int, int, int, int]:
    """Ratios that both runs have; those whose intervals overlap; of these, those with one word;
    those that one run calls faster and the other one slower."""
    both = [(first[key], second[key]) for key in first.keys() & second.keys()]
    overlapping = [(a, b) for a, b in both if overlap(a, b)]
    alike = sum(a.word == b.word for a, b in overlapping)
    opposite = sum({a.word, b.word} == {"faster", "slower"} for a, b in both)
    return len(both), len(overlapping), alike, opposite


def by_chance(ratio: Ratio, of_starts: Sequence[float]) -> float:
    """How often two runs agree on a row if they differ by chance alone: each has starts drawn from
    these, and its interval lies as far from its median as here."""
    found, count = np.asarray(of_starts), len(of_starts)
    drawn = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    shifts = np.median(found[drawn], axis=1) / ratio.median
    runs = [Ratio(ratio.median * s, ratio.low * s, ratio.high * s, count) for s in shifts]
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return statistics.fmean(overlap(a, b) and a.word == b.word for a, b in pairs)


def compared(tables: Sequence[Paired]) -> Table | None:
    """A row for each two runs that have ratios in common."""
    rows = []
    of_runs, chances = {}, {}
    for run in book.runs():
        found = starts(tables, run)
        of_runs[run] = {key: over_starts(each) for key, each in found.items()}
        chances[run] = {key: by_chance(of_runs[run][key], each) for key, each in found.items()}
    for first, second in itertools.combinations(of_runs, 2):
        common, *found_alike = counts(of_runs[first], of_runs[second])
        if common:
            shares = [f"{n} ({n / common:.0%})" for n in found_alike]
            both = chances[first].keys() & chances[second].keys()
            chance = statistics.fmean(chances[run][key] for run in (first, second) for key in both)
            rows.append([first, second, str(common), *shares, f"{chance:.0%}"])
    if not rows:
        return None
    header = ["run", "a later run", "ratios in both", "overlapping intervals", "and the same word"]
    header += ["faster once, slower once", "the same word, by chance"]
    note = (
        f"The goal is {GOAL:.0%} with overlapping intervals and the same word. Two runs that "
        "differ by chance alone reach the share of the last column: each ratio's starts are drawn "
        f"anew, {DRAWS} times, from those of either run. It is below 100 %, because the word of "
        "many ratios hangs on a few percent. Names of runs end with a digest of the machine. "
        "Another processor has other ratios, whether the programs are the same or not. Programs "
        "have changed between runs, too. Runs before 2026-11-29 do not tell the processor's "
        "generation, so one of their digests may stand for several processors."
    )
    return Table(TITLE, header, rows, note)
