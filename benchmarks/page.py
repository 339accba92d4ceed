"""benchmarks/README.md: paired tables from the raw numbers of all runs, other tables as printed."""

from __future__ import annotations

import datetime
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import agreement, book, goals, tell
from .common import Table
from .machine import described, fingerprint
from .pairs import Paired
from .ratio import EQUAL, LEAST_STARTS

NUMBER = re.compile(r"-?[\d.]+%?")
SHOWN = 3  # of the newest runs that have a table: more columns cannot be read
HEAD = f"""# Benchmarks

`make bench` measures everything, alone on the machine: in three hours on a calm machine, in about
seven where a row needs many starts. It can be interrupted, and goes on where it was. `make bench
QUICK=1` measures in five minutes what texts claim. `python -m benchmarks.run --starts 9` makes nine
starts of each row: the ratios take less than three hours then.

**How to read a ratio.** Contestants take turns in the same ranks, in alternating order. Ranks are
started anew at least {LEAST_STARTS} times, because placement, memory and sockets stay as they are
for a whole start. In runs since 2026-11-28 the rows take turns, one start each, so a row's starts
are spread over all hours of the run. "0.94 [0.91, 0.97] faster" is the median over starts, with its
95 % interval (bootstrap over starts). The word is "equal" if the whole interval lies within
±{EQUAL:.0%} of 1, "faster" or "slower" if the interval leaves out 1, and else "unknown". A start
does not count if other programs, or other virtual machines of the same host, used more than a tenth
of a processor (the host's share counts in runs since 2026-11-29). Raw numbers, with the machine and
its load, are in [results](results). A table shows the newest {SHOWN} runs that have it. Times in ms
are medians of the newest run. Below a table stand its goals, and what was tried where they are
missed.

`make soak` writes the table of wrong verdicts. `python -m benchmarks.kernels --out FILE` times the
kernels of one GPU, and whole steps of training. [kernels_h100.json](kernels_h100.json) has the
times of an H100, with torch 2.11.
"""


def sections(text: str) -> dict[str, str]:
    """The tables of a page by their titles."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part.strip()}" for part in parts}


def page(old: str, paired: Sequence[Paired], tables: Sequence[Table]) -> str:
    """The whole page: ratios from the raw numbers, the other tables of ``old`` or new ones."""
    today = datetime.date.today().isoformat()
    others = f"Measured on {described(fingerprint())}; {today}."
    new = {t.title: f"{t.markdown()}\n\n{others}" for t in tables}
    ratios = {t.title: table for t in paired if (table := section(t)) is not None}
    method = [agreement.compared(paired), tell.summary()]
    trials = {t.title: t.markdown() for t in method if t is not None}
    parts = trials | sections(old) | new | ratios | trials  # the first of them come first
    return "\n\n".join([HEAD.rstrip(), *parts.values()]) + "\n"


def section(table: Paired) -> str | None:
    """A paired table over the newest runs that have it; None if no run has it."""
    of_runs = {run: found for run in book.runs() if (found := book.read(run, table)).cases}
    books = [*of_runs.values()]
    if not books:
        return None
    header = [*table.labels, *(_times(table) if len(table.pairs) == 1 else []), *table.facts]
    shown = dict([*of_runs.items()][-SHOWN:])
    columns = [(a, b, run) for a, b in table.pairs for run in shown]
    header += [f"{a} : {b}, {run}" for a, b, run in columns]
    rows = []
    for case in table.cases():
        starts = book.newest(books, case).starts(case.name)
        if not starts:
            continue
        row = [*case.labels]
        if len(table.pairs) == 1:
            row += [_number(_median(starts, who)) for who in table.pairs[0]]
        row += [fact(starts, name) for name in table.facts]
        row += [str(shown[run].ratio(case.name, a, b) or "") for a, b, run in columns]
        rows.append(row)
    text = Table(table.title, header, rows, table.note).markdown()
    return "\n\n".join([text, *goals.in_words(table, books), _machines(shown)])


def _machines(of_runs: Mapping[str, book.Book]) -> str:
    """A line for each machine, behind the names of its runs."""
    runs: dict[str, list[str]] = {}
    for run, found in of_runs.items():
        runs.setdefault(described(found.machine), []).append(run)
    return "\n".join(f"{', '.join(names)}: {machine}." for machine, names in runs.items())


def fact(starts: Sequence[dict[str, Any]], name: str) -> str:
    """What the starts of a case counted: the middle one of numbers, else the most frequent one, and
    how frequent if not all starts have it."""
    found = [str(start["facts"].get(name, "")) for start in starts]
    if all(NUMBER.fullmatch(each) for each in found):
        return sorted(found, key=lambda each: float(each.rstrip("%")))[len(found) // 2]
    ((value, count),) = Counter(found).most_common(1)
    return value if count == len(found) else f"{value} ({count} of {len(found)} starts)"


def _times(table: Paired) -> list[str]:
    return [f"{who}, {table.unit}" for who in table.pairs[0]]


def _median(starts: Sequence[dict[str, Any]], who: str) -> float:
    return statistics.median(v for start in starts for v in start["values"][who])


def _number(value: float) -> str:
    """Three digits; whole numbers from 1,000 on."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
