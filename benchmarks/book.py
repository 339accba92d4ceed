"""Raw numbers of paired benchmarks: one folder per run, one JSON file per table.

A start that other programs disturbed stays in the file, is marked, and does not count. A run that
was interrupted goes on where it was. A case whose sources have changed since is measured anew.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distlab.course import progress
from distlab.course.catalogue import root

from .imported import closure
from .machine import Load, fingerprint, name_of
from .pairs import Case, Paired, Values
from .ratio import LEAST_STARTS, Ratio, of_start, over_starts

FOLDER = "benchmarks/results"


@dataclass
class Book:
    """The starts of one table in one run."""

    machine: dict[str, Any]
    table: str
    date: str
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)  # name: sources, starts

    def starts(self, name: str) -> list[dict[str, Any]]:
        """Those of a case that count."""
        return [s for s in self.cases.get(name, {}).get("starts", []) if s["alone"]]

    def of_starts(self, name: str, ours: str, theirs: str) -> list[float]:
        """The ratio of two contestants in each start of a case; none before there are enough."""
        values = [start["values"] for start in self.starts(name)]
        if len(values) < LEAST_STARTS or not {ours, theirs} <= {*values[0]}:
            return []
        return [of_start(each[ours], each[theirs]) for each in values]

    def ratio(self, name: str, ours: str, theirs: str) -> Ratio | None:
        """The ratio over these starts; None before there are enough."""
        found = self.of_starts(name, ours, theirs)
        return over_starts(found) if found else None


@cache
def sources(module: str) -> str:
    """A digest of the benchmark's module and of all that it imports of the course, also indirectly:
    the solutions, what runs them, and what measures. Comments don't count."""
    digest = hashlib.sha256()
    for path in sorted(closure([root() / "benchmarks" / f"{module}.py"], root())):
        digest.update(ast.dump(ast.parse(path.read_bytes())).encode())
    return digest.hexdigest()[:16]


def this_machine() -> str:
    """The end of the names of this machine's runs."""
    return name_of(fingerprint())


def new_run() -> str:
    """The name of today's run on this machine."""
    return f"{datetime.date.today().isoformat()}-{this_machine()}"


def path_of(run: str, table: Paired) -> Path:
    """The file of a table."""
    return root() / FOLDER / run / f"{table.slug}.json"


def new_book(table: Paired) -> Book:
    """An empty one, for this machine and today."""
    return Book(fingerprint(), table.title, datetime.date.today().isoformat())


def read(run: str, table: Paired) -> Book:
    """What is there of a table; an empty book if there is nothing."""
    path = path_of(run, table)
    if path.exists():
        return Book(**json.loads(path.read_text(encoding="utf-8")))
    return new_book(table)


def newest(books: Sequence[Book], case: Case) -> Book:
    """The last of ``books`` with enough starts of the case; the last one if there is none."""
    enough = (book for book in reversed(books) if len(book.starts(case.name)) >= LEAST_STARTS)
    return next(enough, books[-1])


def runs() -> list[str]:
    """All runs that are kept, oldest first."""
    folder = root() / FOLDER
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []


def one_start(case: Case, rounds: int, number: int) -> dict[str, Any]:
    """Start the ranks once, and what is kept of it."""
    with Load() as load:
        found = case.start(rounds, number)
    values: Values = {who: [float(f"{v:.5g}") for v in each] for who, each in found.values.items()}
    told = {"number": number, "alone": load.alone, **asdict(load)}
    return told | {"values": values, "facts": {**found.facts}}


def measure(tables: Mapping[str, Paired], run: str, most: int, say: Callable[[str], None]) -> None:
    """Measure what the run lacks of the tables, by module; at most ``most`` starts per case.

    The cases of all tables take turns, one start each. So a case's starts are spread over the whole
    run: what changes on a machine from hour to hour widens its interval, and does not move it.
    """
    books = {module: read(run, table) for module, table in tables.items()}
    rows = [
        one_by_one(books[module], table, case, module, path_of(run, table), most, say)
        for module, table in tables.items()
        for case in table.cases()
    ]
    while rows:
        say(f"{len(rows)} {'case' if len(rows) == 1 else 'cases'} to measure")
        rows = [row for row in rows if next(row, None) is not None]


def one_by_one(
    book: Book,
    table: Paired,
    case: Case,
    module: str,
    path: Path,
    most: int,
    say: Callable[[str], None],
) -> Iterator[Book]:
    """Add a case's starts to the book, and yield it after each one, saved; then tell the ratios."""
    path.parent.parent.mkdir(exist_ok=True)
    entry = book.cases.get(case.name)
    if entry is None or entry["sources"] != sources(module):
        book.cases[case.name] = {"sources": sources(module), "starts": []}
    for _ in more_starts(book, table, case, most):
        progress.write(path, asdict(book))
        yield book
    say(told(book, table, case))


def measured_apart(table: Paired, case: Case, source: str, most: int) -> Book:
    """A case alone, in a book that belongs to no run and is not saved."""
    found = new_book(table)
    found.cases[case.name] = {"sources": source, "starts": []}
    for _ in more_starts(found, table, case, most):
        pass
    return found


def more_starts(book: Book, table: Paired, case: Case, most: int) -> Iterator[None]:
    """Add starts of a case to the book until its ratios are told: ``most`` that count, or twice
    as many on a machine that others disturb."""
    starts = book.cases[case.name]["starts"]
    while len(starts) < 2 * most and len(book.starts(case.name)) < most:
        ratios = [book.ratio(case.name, *pair) for pair in table.pairs]
        if all(ratio is not None and ratio.told for ratio in ratios):
            return
        starts.append(one_start(case, table.rounds, len(starts)))
        yield


def told(book: Book, table: Paired, case: Case) -> str:
    """A case's ratios in one line."""
    ratios = "; ".join(
        f"{a} : {b} {book.ratio(case.name, a, b) or 'too few starts'}" for a, b in table.pairs
    )
    disturbed = len(book.cases[case.name]["starts"]) - len(book.starts(case.name))
    return f"{case.name}: {ratios}" + (f" ({disturbed} starts disturbed)" if disturbed else "")
