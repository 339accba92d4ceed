"""Run benchmarks and write benchmarks/README.md: ``make bench``, alone on the machine.

``python -m benchmarks.run NAME …`` measures some tables. What today's run on this machine has
already is not measured again. ``--quick`` measures the ratios that texts claim, in five minutes,
and fails if one does not hold; it writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from distlab.course.catalogue import root

from . import book
from .claims import broken, claims
from .common import Table
from .page import page
from .pairs import Paired
from .ratio import LEAST_STARTS, MOST_STARTS

PAIRED = (
    "ranks",
    "trainer",
    "split",
    "mixed_precision",
    "recompute",
    "selective",
    "pipeline",
    "tensor_parallel",
    "context_parallel",
    "experts",
    "sync_batch_norm",
    "low_precision",
    "allreduce",
    "ddp",
    "uneven",
    "fsdp",
    "per_parameter",
    "mesh",
    "zero",
    "hierarchical",
    "checkpoint",
    "compression",
    "monitoring",
    "image_trainer",
)
TABLES = (
    "grading",
    "allreduce_costs",
    "local_sgd",
    "parameter_server",
    "compression_digits",
    "virtual",
    "scale",
    "validation",
    "curves",
    "published",
)


def paired(name: str) -> Paired:
    """The paired table of a module."""
    found: Paired = importlib.import_module(f".{name}", __package__).PAIRED
    return found


def measured(names: Sequence[str], run: str, most: int) -> list[Table]:
    """Measure the paired tables into the run's files; the other tables."""

    def say(line: str) -> None:
        print(line, flush=True)

    pairs = {}
    for name in filter(PAIRED.__contains__, names):
        table = paired(name)
        obstacle = table.obstacle()
        if obstacle is None:
            pairs[name] = table
        else:
            say(f"{name} is not measured: {obstacle}")
    book.measure(pairs, run, most, say)
    tables = []
    for name in names:
        if name in TABLES:
            say(f"== {name}")
            tables.append(importlib.import_module(f".{name}", __package__).measure())
            say(tables[-1].markdown())
    return tables


def quick() -> int:
    """Measure what is claimed; the number of claims that do not hold."""
    wrong = 0
    for claim in claims():
        table = paired(claim.table)
        case = next(case for case in table.cases() if case.name == claim.case)
        found = book.measured_apart(table, case, book.sources(claim.table), LEAST_STARTS)
        problem = broken(claim, found)
        wrong += problem is not None
        print(book.told(found, table, case), f"  {claim.where}: {problem or 'holds'}", sep="\n")
    return wrong


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAIRED + TABLES)}")
    parser.add_argument("--quick", action="store_true", help="only what is claimed; writes nothing")
    parser.add_argument(
        "--run", metavar="RUN", help="go on with this run of benchmarks/results, or begin it"
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=MOST_STARTS,
        metavar="N",
        help=f"at most N starts of a row, {LEAST_STARTS} or more (default: {MOST_STARTS})",
    )
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page anew")
    options = parser.parse_args()
    unknown = {*options.names} - {*PAIRED, *TABLES}
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}")
    if options.run and not options.run.endswith(f"-{book.this_machine()}"):
        parser.error(
            f"--run {options.run}: a run goes on where it began, and its name ends with a digest "
            f"of the machine; this machine's is {book.this_machine()}"
        )
    if options.starts < LEAST_STARTS:
        parser.error(f"--starts {options.starts}: an interval needs {LEAST_STARTS} starts or more")
    torch.set_num_threads(1)
    if options.quick:
        return min(quick(), 1)
    path: Path = root() / "benchmarks" / "README.md"
    tables = []
    if not options.page:
        run = options.run or book.new_run()
        tables = measured(options.names or PAIRED + TABLES, run, options.starts)
    old = path.read_text(encoding="utf-8")
    path.write_text(page(old, [paired(n) for n in PAIRED], tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
