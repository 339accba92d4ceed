"""The command behind python test_phaseN.py."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..course import progress
from ..course.catalogue import Phase, load_course
from ..course.version import course_version
from ..host.processes import TERMINATED, Terminated, terminable
from ..host.terminal import console
from .report import print_report
from .sources import find_source, phase_of
from .untouched import blank_report
from .verdicts import TIERS

# asks for something before exercises are graded, and returns what to do afterwards
First = Callable[[Sequence[str], Console], Callable[[], None] | None]


def _parser(phase: Phase) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"test_phase{phase.number}.py",
        description=f"Grade phase {phase.number}: {phase.title}.",
        epilog="Exit status: 0 if all that was asked for passed, 1 if not, 2 for a wrong call, "
        "130 after Ctrl-C, 143 after SIGTERM.",
    )
    parser.add_argument("exercises", nargs="*", help="exercise ids, for example 1.4; default: all")
    parser.add_argument("--impl", default="templates", help="templates, solutions or a folder")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--junitxml", metavar="FILE", help="write the result as JUnit XML")
    parser.add_argument("--seed", type=int, help="repeat a run: inputs and delays come from it")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--tier", default="", choices=TIERS, help="these checks only; nccl: NCCL's rules, simulated"
    )
    parser.add_argument(
        "--partial", action="store_true", help="a share of the points for a share of the checks"
    )
    parser.add_argument(
        "--sandbox", action="store_true", help="run the code in namespaces of its own (Linux)"
    )
    parser.add_argument(
        "--jobs", type=_positive, help="checks at a time; default: as many as processors, up to 4"
    )
    parser.add_argument("-k", dest="keyword", default="", help="only checks whose name matches")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def main(
    phase: int,
    argv: Sequence[str] | None = None,
    watched: bool = False,
    first: First | None = None,
) -> int:
    """The command behind ``python test_phaseN.py``; returns the exit status.

    ``watched``: by ``distlab watch``, which has named the exercise already and may end the grading
    at any time. ``first`` is called only where a learner sits at a terminal, and has named
    exercises of their own work.
    """
    out = console()
    try:
        with terminable():
            return _run(phase, argv, out, watched, first)
    except (ValueError, OSError) as error:
        print(f"test_phase{phase}.py: {error}", file=sys.stderr)
        return 2
    except Terminated:
        print("ended by SIGTERM: nothing was recorded, no rank is left running", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        if not watched:
            print("interrupted: nothing was recorded, no rank is left running", file=sys.stderr)
        return 130


def _run(
    phase: int, argv: Sequence[str] | None, out: Console, watched: bool, first: First | None
) -> int:
    chosen = phase_of(phase)
    options = _parser(chosen).parse_args(argv)
    for exercise_id in options.exercises:
        if load_course().exercise(exercise_id).phase.number != phase:
            raise ValueError(f"exercise {exercise_id} is not in phase {phase}")
    find_source(options.impl, chosen)
    for name in filter(None, (options.json, options.junitxml)):
        check_writable(Path(name))
    asks = first if _learner_is_there(options, out) else None
    after = asks(options.exercises, out) if asks else None
    status = _grade_and_print(chosen, options, out, watched)
    if after:
        after()
    return status


def _learner_is_there(options: argparse.Namespace, out: Console) -> bool:
    """Whether a person grades their own work, and reads what is printed."""
    machine = options.json or options.junitxml or os.environ.get("CI")
    own = options.impl == "templates" and not options.keyword and not options.sandbox
    return bool(own and not machine and out.is_terminal and sys.stdin.isatty())


def _grade_and_print(phase: Phase, options: argparse.Namespace, out: Console, watched: bool) -> int:
    begun = time.monotonic()
    mine = options.impl == "templates"
    asked = options.exercises or [e.id for e in phase.exercises]
    if out.is_terminal and not watched:
        many = f"{len(asked)} exercises of phase {phase.number}"
        what = f"grading {asked[0] if len(asked) == 1 else many} …"
        out.print(Text(f"{what}  (course version {course_version()})", "dim"))
    report = None
    if not any((options.json, options.junitxml, options.keyword, options.tier, options.sandbox)):
        report = blank_report(phase, options.impl, options.exercises, options.seed)
    if report is None:
        from .asked import graded  # start-up time: torch and pytest

        report = graded(phase, options, out.is_terminal or watched)
    if out.is_terminal or watched:
        out.print()
    if mine:
        for exercise in report.exercises:
            exercise.hints_used = progress.hints_used(exercise.id)
        if not (options.keyword or options.tier):  # all checks, so the verdict is the exercise's
            results = [(e.id, e.verdict, e.points) for e in report.exercises]
            along = [(i, "pass", load_course().exercise(i).points) for i in report.along]
            report.notes += progress.record(results, along)
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_json(), indent=2) + "\n")
    print_report(report, phase, out)
    out.print(f"graded in {time.monotonic() - begun:.1f} s", style="dim", highlight=False)
    if not report.exercises:
        named = f"-k {options.keyword!r}" if options.keyword else f"--tier {options.tier}"
        raise ValueError(f"no check matches {named}")
    return 0 if report.passed else 1


def check_writable(path: Path) -> None:
    """Fail before grading if a result file can't be written, and lose nothing."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {folder} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: no permission to write there")
