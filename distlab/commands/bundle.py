"""``distlab bundle 3.10`` packs a verdict, ``distlab bundle --open FILE`` grades it again."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from ..classes import bundle
from ..course.catalogue import Exercise, load_course
from ..grading import grade
from ..grading.report import print_report
from ..grading.session import Request
from ..host.terminal import command, say


def pack(exercise: Exercise, options: argparse.Namespace, out: Console) -> int:
    """Grade the exercise and write all that is needed to look at the verdict elsewhere."""
    to = options.out or Path(f"bundle-{exercise.id}.zip")
    if to.exists():
        raise ValueError(f"{to} exists already: name another file with --out")
    request = Request(
        impl=options.impl, exercises=(exercise.id,), seed=options.seed, partial=options.partial
    )
    report = grade(exercise.phase.number, request)
    bundle.pack(exercise, request, report, to)
    (result,) = report.exercises
    say(out, f"{exercise.id} {exercise.title}: {result.verdict}, {result.points} points")
    say(out, f"{to} holds your files of phase {exercise.phase.number}, the report and the seed")
    command(out, "look at it elsewhere: ", f"distlab bundle --open {to.name}")
    return 0


def reopen(path: Path, out: Console) -> int:
    """Grade a bundle again: 0 if all verdicts are the same, 1 if not."""
    found = bundle.opened(path)
    exercise = load_course().exercise(str(found.manifest["exercise"]))
    with tempfile.TemporaryDirectory(prefix="distlab-bundle-") as folder:
        report = grade(exercise.phase.number, found.request(Path(folder)))
    print_report(report, exercise.phase, out)
    for line in bundle.surroundings(found, exercise):
        say(out, line, "dim")
    other = bundle.differences(found.report, report.as_json())
    there, (result,) = found.manifest["verdict"], report.exercises
    if not other and there == result.verdict:
        say(out, f"the same verdict: {there}, check by check", "bold")
        return 0
    say(out, f"another verdict: {there} there, {result.verdict} here", "bold yellow")
    for line in other:
        say(out, line, indent="  ")
    return 1
