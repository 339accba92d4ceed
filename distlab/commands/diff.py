"""distlab diff: where two recorded runs first differ."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..host.terminal import say
from ..observe.differ import Difference, differences
from ..observe.runs import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("first", type=Path, help="a run: distlab trace --record FILE, or a folder")
    parser.add_argument("second", type=Path, help="the run to compare it with")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="T",
        help="numbers that differ by a share of T or less are equal; default: 0",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the differences as data")


def main(options: argparse.Namespace, out: Console) -> int:
    """Show the first difference, and where each rank first differs; 0 if there is none, else 1."""
    if not 0 <= options.tolerance < 1:
        raise ValueError(f"--tolerance must be at least 0 and below 1, got {options.tolerance}")
    one, other = read_run(options.first), read_run(options.second)
    found = differences(one, other, options.tolerance)
    if options.json:
        text = json.dumps([asdict(each) for each in found], indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    if not found:
        count = sum(len(run.events) for run in one)
        say(out, f"no difference: {len(one)} ranks, {count} communications")
        return 0
    _tell(found[0], "first difference: ", out)
    for each in found[1:]:
        _tell(each, "at the same time: " if each.time == found[0].time else "later: ", out)
    return 1


def _tell(each: Difference, label: str, out: Console) -> None:
    if each.what == "rank":
        say(out, each.text, label=label)
        return
    say(
        out,
        f"rank {each.rank}, communication {each.index + 1}, {each.op}: {each.what}",
        label=label,
    )
    say(out, each.text, indent="  ")
    if each.line:
        say(out, each.line, indent="  ", label="line: ")
