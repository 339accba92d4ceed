"""``distlab measure 3.3``: one number of an exercise, measured on this machine.

The exercise's scenario runs on 4 ranks by the learner's implementation, in several fresh starts.
The number is the one that the exercise is about: the time of the run, or its hidden, waiting or
idle share. It is kept in ``.distlab/measured.json``. ``distlab measure`` lists the measured
numbers. The site shows them in the exercises' sections when it is built here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..course import progress
from ..course.catalogue import Exercise, load_course, root
from ..host.terminal import say, short
from .scenario import RANKS, run_scenario, scenario_of

STARTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("exercise", nargs="?", help="for example 3.3; default: list what there is")
    parser.add_argument("--impl", default="templates", help="templates, solutions or a folder")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"default: {STARTS}")


def main(options: argparse.Namespace, out: Console) -> int:
    """Measure an exercise, or list the measured numbers; returns 0 if that was possible."""
    if options.exercise is None:
        return _list(out)
    if options.starts < 1:
        raise ValueError(f"--starts {options.starts}: at least 1")
    exercise = load_course().exercise(options.exercise)
    with out.status(f"{options.starts} starts of {RANKS} ranks"):
        found = measured(exercise, options.impl, options.starts)
    path = keep(exercise.id, found)
    say(out, f"{exercise.id} {exercise.title} ({found['scenario']})")
    say(out, f"{sentence(found)}.")
    say(out, f"{short(path)}  (kept)")
    return 0


def measured(exercise: Exercise, impl: str, starts: int) -> dict[str, Any]:
    """The numbers of ``starts`` runs, their circumstances, and the scenario."""
    # start-up time: they import torch, and the list need not wait for that
    from ..picture.measured import QUANTITIES
    from ..picture.spans import spans_of

    scenario = scenario_of(exercise)
    quantity = QUANTITIES[scenario.trace_of[exercise.id]]
    values = []
    for _ in range(starts):
        spans = spans_of(run_scenario(exercise, impl, scenario))
        if not spans:
            raise ValueError(f"the run of {exercise.id} recorded nothing to measure")
        values.append(quantity.of(spans))
    return {
        "says": quantity.says,
        "values": [round(value, 3) for value in sorted(values)],
        "scenario": (scenario.__doc__ or exercise.title).split("\n")[0].rstrip("."),
        "impl": impl,
        "ranks": RANKS,
        "cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
    }


def sentence(found: dict[str, Any]) -> str:
    """The measured number with its spread and its circumstances, without a full stop."""
    values = found["values"]
    middle, least, most = (_short(v) for v in (statistics.median(values), values[0], values[-1]))
    spread = f" ({least} to {most} in {len(values)} starts)" if len(values) > 1 else ""
    where = f"{found['ranks']} ranks on {found['cores']} cores, {found['impl']}, {found['date']}"
    return f"{found['says'].format(middle)}{spread}; {where}"


def _short(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def kept_file() -> Path:
    """The file of the numbers."""
    return root() / ".distlab" / "measured.json"


def kept() -> dict[str, dict[str, Any]]:
    """The measured numbers by exercise. Raises ValueError if the file is damaged."""
    path = kept_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for found in data.values():
            sentence(found)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{short(path)} is damaged: delete it, and measure again") from None
    return dict(data)


def keep(exercise_id: str, found: dict[str, Any]) -> Path:
    """Add a number to the file, or replace it there. After a crash the old file is still there."""
    path = kept_file()
    data = kept() | {exercise_id: found}
    progress.write(path, data)
    return path


def _list(out: Console) -> int:
    found = kept()
    if not found:
        print("distlab: nothing was measured yet: distlab measure 1.4", file=sys.stderr)
        return 1
    table = Table("exercise", "measured", box=None, header_style="dim", pad_edge=False)
    for exercise in load_course().exercises:
        if exercise.id in found:
            table.add_row(exercise.id, sentence(found[exercise.id]))
    out.print(table)
    return 0
