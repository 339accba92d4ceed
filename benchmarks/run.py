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

from distlab.course.catalogue import root
from distlab.reference.provenance import cpu_name

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
    "context_parallel",
    "experts",
    "sync_batch_norm",
    "allreduce",
    "ddp",
    "uneven",
    "fsdp",
    "per_parameter",
    "zero",
    "hierarchical",
    "local_sgd",
    "parameter_server",
    "checkpoint",
    "compression",
    "compression_digits",
    "monitoring",
    "image_trainer",
    "virtual",
    "validation",
    "published",
)
FROM_ELSEWHERE = (  # `make soak` takes hours, and the text below its table is written by hand
    "Wrong verdicts on right code",
    "Wrong verdicts that depend on the seed",
)
HEAD = """# Benchmarks

Written by `make bench`, which takes half an hour. `python -m benchmarks.run NAME …` measures some
tables anew. Ratios are those of medians from one run, and each table says where it was measured.
Numbers depend on the machine and on its other work, so run the benchmarks alone. `make soak` writes
the table of wrong verdicts.

`python -m benchmarks.kernels --out FILE` times the kernels of one GPU, and whole steps of training.
[kernels_h100.json](kernels_h100.json) has the times of an H100, with torch 2.11.
"""


def machine() -> str:
    """The machine and the versions of the measurement, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    return (
        f"Measured on {cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB memory{gpu}; "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"gloo over loopback; {datetime.date.today().isoformat()}."
    )


def sections(text: str) -> dict[str, str]:
    """The tables of a page by their titles."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part.strip()}" for part in parts}


def page(old: dict[str, str], tables: Sequence[Table]) -> str:
    """The whole README.md: the ``old`` sections, and in their place or after them the new ones."""
    new = {t.title: f"{t.markdown()}\n\n{machine()}" for t in tables}
    return "\n\n".join([HEAD.rstrip(), *(old | new).values()]) + "\n"


def main() -> int:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    quick = "one repeat of each, only to see that they run: nothing is written"
    parser.add_argument("--quick", action="store_true", help=quick)
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    repeats: tuple[int, ...] = (1,) if options.quick else ()
    torch.set_num_threads(1)
    path = root() / "benchmarks" / "README.md"
    kept = sections(path.read_text(encoding="utf-8"))
    if not options.names:
        kept = {title: text for title, text in kept.items() if title in FROM_ELSEWHERE}
    tables = []
    for name in options.names or BENCHMARKS:
        benchmark = importlib.import_module(f".{name}", __package__)
        tables.append(benchmark.measure(*repeats))
        print(tables[-1].markdown(), end="\n\n", flush=True)
        if not options.quick:  # finished tables are kept, also when a later benchmark fails
            path.write_text(page(kept, tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
