"""``distlab plan``: which layout for a training, and how many days and GPU hours it takes."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..simulate.job import Job
from ..simulate.search import RESTART, TOP, operation
from ..simulate.search_report import answer, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", required=True, help="a language model, for example llama-70b")
    parser.add_argument("--cluster", default="dgx-h100", help="name in clusters/, or a YAML file")
    parser.add_argument(
        "--gpus", type=int, nargs="+", required=True, metavar="N", help="how many; several: compare"
    )
    parser.add_argument("--tokens", type=float, required=True, help="to train on, for example 1e12")
    parser.add_argument("--batch", type=float, default=0.0, help="tokens of a step on all GPUs")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--price", type=float, default=0.0, help="of a GPU hour: adds the cost")
    parser.add_argument("--top", type=int, default=TOP, help=f"layouts that are simulated ({TOP})")
    parser.add_argument(
        "--failures", type=float, default=0.0, metavar="HOURS", help="of one GPU between failures"
    )
    parser.add_argument(
        "--storage", type=float, default=0.0, metavar="GB/S", help="that all GPUs write together"
    )
    parser.add_argument(
        "--restart",
        type=float,
        default=RESTART,
        metavar="SECONDS",
        help=f"from a failure to work ({RESTART:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows as data")
    parser.add_argument("--out", type=Path, default=Path(".distlab/plan"), help="folder")


def main(options: argparse.Namespace, out: Console) -> int:
    """Search, print the table, draw the winner."""
    for name in ("price", "failures", "storage", "restart"):
        if not getattr(options, name) >= 0:
            raise ValueError(f"--{name} must not be negative")
    if options.top < 1:
        raise ValueError("--top must be at least 1")
    jobs = []
    for gpus in dict.fromkeys(options.gpus):
        job = Job(
            model=options.model,
            cluster=options.cluster,
            gpus=gpus,
            tokens=options.tokens,
            batch=options.batch,
            length=options.length,
        )
        storage = options.storage * 1e9
        jobs.append((job, operation(job, options.failures, storage, options.restart)))
    rows = answer(jobs, options.top, options.price, options.out, out)
    if options.json:
        write(rows, options.price, options.json)
    return 0
