"""Labs in the map: points apart from those of exercises, what is next, and the list of all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..course import ahead, progress
from ..course.catalogue import Exercise, load_course
from ..host.terminal import command, say
from ..labs.index import KINDS, Listed, listed

WHOLE_RUNS = 0  # what stands for a phase where a lab is about none


def labs_of(exercises: Iterable[Exercise]) -> list[Listed]:
    """The labs about these exercises."""
    ids = {e.id for e in exercises}
    return [lab for lab in listed() if lab.exercise in ids]


def show_sum(labs: Sequence[Listed], out: Console) -> None:
    """A line with the points of these labs, and how many of each kind were done."""
    if not labs:
        return
    done = progress.labs()
    kinds = []
    for kind in KINDS:
        own = [lab for lab in labs if lab.kind == kind]
        if own:
            kinds.append(f"{kind} {sum(lab.id in done for lab in own)} of {len(own)}")
    points = sum(float(done.get(lab.id, {}).get("points", 0)) for lab in labs)
    most = sum(lab.points for lab in labs)
    text = f"{points:g} of {most:g} points; done: {', '.join(kinds)}"
    say(out, text, "dim", label="labs: ", indent="  ")


def next_lab(exercises: Sequence[Exercise], entries: ahead.Entries) -> Listed | None:
    """The first lab that was not tried and that spoils nothing; None if there is none.

    Its exercise passed, so the next one stands after the learner's own work.
    """
    done = progress.labs()
    passed = [e for e in exercises if entries.get(e.id, {}).get("verdict") == "pass"]
    return next((lab for lab in labs_of(passed) if lab.id not in done), None)


def show_next(lab: Listed | None, out: Console) -> None:
    """What the lab is, and how it begins."""
    if lab is not None:
        text = f"{lab.id} {lab.title} ({KINDS[lab.kind][0]}, {lab.points:g} points)"
        say(out, text, label="lab:  ")
        command(out, "  begin  ", lab.command)


def as_data(labs: Iterable[Listed]) -> list[dict[str, Any]]:
    """What is known of labs, for programs. No exercise: it would tell where a bug is."""
    done = progress.labs()
    shown = ("points", "hints")
    return [
        {"id": lab.id, "kind": lab.kind, "phase": lab.phase, "level": lab.level}
        | {"title": lab.title, "max_points": lab.points}
        | {key: value for key, value in done.get(lab.id, {}).items() if key in shown}
        for lab in labs
    ]


# -- distlab lab list -----------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the list."""
    parser.add_argument("--phase", type=int, help="labs of this phase; 0: about whole runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the list, for programs")


def main(options: argparse.Namespace, out: Console) -> int:
    """All labs with what was reached."""
    if not listed():
        raise ValueError("this hand-out has no list of labs: your instructor hands labs out")
    course = load_course()
    if options.phase is not None and options.phase != WHOLE_RUNS:
        course.phase(options.phase)
    labs = [lab for lab in listed() if options.phase in (None, lab.phase)]
    if options.json:
        options.json.write_text(json.dumps(as_data(labs), indent=2) + "\n", encoding="utf-8")
    for number in sorted({lab.phase for lab in labs}, key=lambda n: n or len(course.phases) + 1):
        own = [lab for lab in labs if lab.phase == number]
        heading = f"Phase {number}: {course.phase(number).title}" if number else "Whole runs"
        out.print(Text(f"\n{heading}", "bold"))
        _show(own, out)
        show_sum(own, out)
    return 0


def _show(labs: Sequence[Listed], out: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "kind", "level", "points", "hints", "title"):
        table.add_column(name, justify="right" if name in ("level", "points", "hints") else "left")
    done = progress.labs()
    for lab in labs:
        mine = done.get(lab.id, {})
        reached = f"{mine.get('points', 0):g}" if lab.id in done else "–"
        points = f"{reached}/{lab.points:g}"
        cells = (f"  {lab.id}", lab.kind, str(lab.level), points, str(mine.get("hints") or ""))
        table.add_row(*cells, lab.title)
    out.print(table)
