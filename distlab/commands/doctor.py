"""``distlab doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ..host.terminal import say
from . import machine
from .machine import INSTALL, Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--cuda", action="store_true", help="run the solutions on this machine's GPUs (10 minutes)"
    )
    parser.add_argument("--out", type=Path, help="with --cuda: folder of the records")


def main(options: argparse.Namespace, out: Console) -> int:
    """Print a line per finding; returns 0 if this machine can run the course, else 1."""
    if options.cuda:
        # start-up time: it imports torch
        from .gpu_run import examine

        return examine(options.out, options.json, out)
    found = []
    for finding in findings():
        found.append(finding)
        show(finding, out)
    lacking = [f for f in found if f.needed and not f.ok]
    if options.json:
        data = {"usable": not lacking, "findings": [asdict(finding) for finding in found]}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if lacking:
        first = lacking[0]
        text = f"The course can't be worked through here. {first.name}: {first.text}"
        say(out, text, "bold red")
        return 1
    good = all(finding.ok for finding in found)
    more = "" if good else " What is marked -- is missing, and not needed for it."
    say(out, f"The course can be worked through here.{more}", "bold green")
    return 0


def findings() -> Iterator[Finding]:
    """All findings about this machine."""
    yield from machine.findings()
    try:
        # start-up time: it imports torch, and a torch that can't be imported is a finding, too
        from .machine_torch import findings as with_torch
    except (ImportError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        yield Finding("torch", False, f"can't be imported: {said[0]}", INSTALL, needed=True)
        yield from machine.graphics()
    else:
        yield from machine.graphics()
        yield from with_torch()


def show(finding: Finding, out: Console) -> None:
    """One line: the mark, the name, the finding, and how to get a missing part."""
    mark = "ok" if finding.ok else "NO" if finding.needed else "--"
    how = "" if finding.ok or not finding.remedy else f". To get it: {finding.remedy}"
    style = "bold red" if mark == "NO" else ""
    say(out, f"{finding.name}: {finding.text}{how}", style, label=f"{mark}  ", indent="  ")
