"""``distlab bundle 3.10`` packs a verdict, ``distlab bundle --open FILE`` grades it again."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from .. import sandbox
from ..classes import bundle
from ..course.catalogue import Exercise, load_course
from ..grading import grade
from ..grading.report import print_report
from ..host.terminal import command, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("exercise", nargs="?", help="for example 1.4")
    parser.add_argument("--impl", default="templates", help="templates or a folder")
    parser.add_argument("--seed", type=int, help="of the run that gave the verdict")
    parser.add_argument("--partial", action="store_true", help="points as with --partial")
    parser.add_argument("--out", type=Path, help="default: bundle-EXERCISE.zip")
    parser.add_argument("--open", type=Path, metavar="FILE", help="grade a bundle again")
    parser.add_argument("--unsafe", action="store_true", help="open it without a sandbox")


def main(options: argparse.Namespace, out: Console) -> int:
    """Pack a verdict, or look at one again."""
    if options.open is not None:
        return reopen(options.open, options.unsafe, out)
    if options.exercise is None:
        raise ValueError("bundle which exercise? `distlab bundle 1.4`, or --open FILE")
    return pack(load_course().exercise(options.exercise), options, out)


def pack(exercise: Exercise, options: argparse.Namespace, out: Console) -> int:
    """Grade the exercise and write everything that a look at the verdict elsewhere needs."""
    to = options.out or Path(f"bundle-{exercise.id}.zip")
    if to.exists():
        raise ValueError(f"{to} exists already: name another file with --out")
    files = bundle.work(exercise, options.impl)
    request = bundle.request(exercise, options.impl, options.seed, partial=options.partial)
    report = grade(exercise.phase.number, request)
    bundle.pack(exercise, request, report, files, to)
    (result,) = report.exercises
    say(out, f"{exercise.id} {exercise.title}: {result.verdict}, seed {report.seed}")
    say(out, f"{to} holds your files of phase {exercise.phase.number}, the report and the seed")
    command(out, "to look at it elsewhere: ", f"distlab bundle --open {to.name}")
    return 0


def reopen(path: Path, unsafe: bool, out: Console) -> int:
    """Grade a bundle again, in a sandbox: 0 if all verdicts are the same, 1 if not."""
    found = bundle.opened(path)
    why = "" if unsafe else sandbox.obstacle()
    if why:
        raise ValueError(
            f"a bundle holds somebody's code, and no sandbox can be made here ({why}): --unsafe "
            "runs it without one"
        )
    with tempfile.TemporaryDirectory(prefix="distlab-bundle-") as folder:
        request = found.request(Path(folder))
        request = replace(request, sandbox=None if unsafe else sandbox.Limits())
        report = grade(found.exercise.phase.number, request)
    print_report(report, found.exercise.phase, out)
    for line in bundle.surroundings(found):
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
