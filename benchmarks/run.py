"""Run all benchmarks and write benchmarks/README.md: ``make bench`` (some minutes, alone)."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import sys
from collections.abc import Sequence

import torch

from distlab.course import root
from distlab.references import cpu_name

from .common import Table

BENCHMARKS = (
    "ranks",
    "grading",
    "trainer",
    "split",
    "mixed_precision",
    "recompute",
    "pipeline",
    "tensor_parallel",
    "allreduce",
    "ddp",
    "zero",
    "fsdp",
    "hierarchical",
    "virtual",
    "validation",
    "published",
)
HEAD = """# Benchmarks

Written by `make bench`; ratios are of medians from this one run. Numbers depend on the machine, and
on what else it does: run it alone.
"""


def machine() -> str:
    """What the numbers were measured on, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return (
        f"Machine: {cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB memory{gpu}; "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"gloo over loopback; {datetime.date.today().isoformat()}."
    )


def page(tables: Sequence[Table]) -> str:
    """The whole README.md."""
    return "\n\n".join([HEAD.rstrip(), machine(), *(t.markdown() for t in tables)]) + "\n"


def main() -> int:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    quick = "one repeat of each, only to see that they run: nothing is written"
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args()
    repeats: tuple[int, ...] = (1,) if options.quick else ()
    torch.set_num_threads(1)
    tables = []
    for name in BENCHMARKS:
        benchmark = importlib.import_module(f".{name}", __package__)
        tables.append(benchmark.measure(*repeats))
        print(tables[-1].markdown(), end="\n\n", flush=True)
    if not options.quick:
        (root() / "benchmarks" / "README.md").write_text(page(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
