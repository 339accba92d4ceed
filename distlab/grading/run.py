"""Run the grader: from the command line (``main``) and from other code (``grade``)."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from ..course import Course, Exercise, Phase, load_course, root
from ..processes import (
    TERMINATED,
    Terminated,
    become_subreaper,
    children,
    die_with_parent,
    end_strays,
    forget_descriptors,
    not_for_children,
    terminable,
)
from .implementation import find_source
from .lifetime import contained
from .live import View
from .report import console, print_report
from .session import Request, Session
from .verdicts import CheckResult, ExerciseResult, Report


class Carrier:
    """Hands the session to the pytest plugin before its own configuration runs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.problems: list[str] = []
        self.interrupt: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from .plugin import SESSION

        config.stash[SESSION] = self.session
        config.option.tbstyle = "line"  # the plugin writes what failed; tracebacks cost time

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(str(report.longrepr).strip().splitlines()[-1])

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # by a failed collection
            self.interrupt = excinfo.value


def _prerequisites(course: Course, ids: Iterable[str]) -> set[str]:
    """All exercises that those in ``ids`` build on."""
    found: set[str] = set()
    todo = list(ids)
    while todo:
        exercise = course.exercise(todo.pop())
        new = {*exercise.uses, *exercise.requires} - found
        found |= new
        todo += new
    return found


def check_files(exercise: Exercise) -> list[Path]:
    """The files with checks of the exercise; others are not even imported."""
    marker = f'@exercise("{exercise.id}"'
    files = root().glob(exercise.checks_glob)
    return [path for path in files if marker in path.read_text(encoding="utf-8")]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a request comes to: the exercises to grade (``selected``), those and all that they
    build on (``every``), and the files that hold their checks."""

    phase: Phase
    request: Request
    selected: tuple[str, ...]
    every: list[Exercise]
    files: tuple[str, ...]

    def session(self, view: View | None = None) -> Session:
        """The state of a new run, of which ``view`` is told."""
        ids = tuple(e.id for e in self.every)
        return Session(Request(**vars(self.request) | {"exercises": ids}), load_course(), view=view)

    def report(self, session: Session, notes: Sequence[str] = (), whole: bool = True) -> Report:
        """The results of a run; ``whole``: a selected exercise without any is an error."""
        device = "cuda" if self.request.device == "cuda" else "cpu"
        number, impl = self.phase.number, self.request.impl
        report = Report(number, impl, session.seed, device, notes=list(notes))
        for exercise in self.every:
            if exercise.id not in self.selected:
                continue
            result = session.results.get(exercise.id)
            if result is not None:
                report.exercises.append(result)
            elif whole and not self.request.checks:
                report.exercises.append(_unchecked(exercise))
        return report


def plan(phase: Phase, request: Request) -> Plan:
    """Which exercises are graded for this request, and where their checks are."""
    course = load_course()
    selected = request.exercises or tuple(e.id for e in phase.exercises)
    needed = set() if request.trusted else _prerequisites(course, selected) - request.known
    every = [e for e in course.exercises if e.id in needed or e.id in selected]
    files = tuple(sorted({str(path) for e in every for path in check_files(e)}))
    return Plan(phase=phase, request=request, selected=selected, every=every, files=files)


def call_pytest(files: Iterable[str], plugins: list[object], *options: str) -> None:
    """pytest on these check files, silently and without what a grader has no use for."""
    arguments = [
        *files,
        *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "distlab.grading.plugin"),
        *("-c", str(root() / "pyproject.toml"), "--rootdir", str(root()), "-o", "addopts="),
        "--assert=plain",  # checks say themselves what is wrong
        *("-p", "no:unraisableexception", "-p", "no:threadexception", "-p", "no:logging"),
        *options,
    ]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins cost time
    gc.freeze()  # torch is no garbage: looking through it takes half a second each time
    with contained():
        pytest.main(arguments, plugins=plugins)
    gc.unfreeze()


def run_session(
    phase: Phase,
    request: Request,
    keyword: str = "",
    junitxml: str = "",
    view: View | None = None,
) -> Report:
    """Grade in this process: pytest on the phase's check files; returns the report.

    Silently, but for what ``view`` shows of checks as they end.
    """
    chosen = plan(phase, request)
    carrier = Carrier(chosen.session(view))
    options = [*(("-k", keyword) if keyword else ())]
    options += [f"--junitxml={junitxml}"] if junitxml else []
    call_pytest(chosen.files, [carrier], *options)
    if carrier.interrupt is not None:
        raise carrier.interrupt
    return chosen.report(carrier.session, carrier.problems, whole=not keyword)


def _unchecked(exercise: Exercise) -> ExerciseResult:
    """An exercise none of whose checks ran is an error of the course, never a pass."""
    check = CheckResult("", "error", "no check of this exercise could be loaded", "error")
    return ExerciseResult(exercise.id, exercise.title, exercise.points, checks=[check])


def _phase(number: int) -> Phase:
    """The phase; ValueError if there is nothing in it to grade."""
    phase = load_course().phase(number)
    if not phase.exercises:
        raise ValueError(f"phase {number} has no exercises yet: there is nothing to grade")
    return phase


def grade(phase: int, request: Request) -> Report:
    """Grade in a forked child, so that nothing of the run stays in this process."""
    chosen = _phase(phase)
    reading, writing = os.pipe()
    become_subreaper()
    before, parent = children(), os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        status = 1
        try:
            not_for_children.append(writing)
            forget_descriptors({writing})
            with terminable():
                die_with_parent(parent, signal.SIGTERM)
                report = run_session(chosen, request)
            with os.fdopen(writing, "w") as pipe:
                pipe.write(dumped(report))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    end_strays(before)  # if the child was killed
    if not text:
        raise RuntimeError("the grader's child ended without a report")
    return loaded(text)


def dumped(report: Report) -> str:
    """The report as one line of text."""
    exercises = [vars(e) | {"checks": [vars(c) for c in e.checks]} for e in report.exercises]
    return json.dumps(vars(report) | {"exercises": exercises})


def loaded(text: str) -> Report:
    """The report that ``dumped`` has written."""
    data = json.loads(text)

    def check(fields: dict[str, Any]) -> CheckResult:
        printed = {int(rank): said for rank, said in fields["printed"].items()}
        return CheckResult(**fields | {"printed": printed})

    exercises = [
        ExerciseResult(**e | {"checks": [check(c) for c in e["checks"]]})
        for e in data["exercises"]
    ]
    return Report(**data | {"exercises": exercises})


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
    parser.add_argument("-k", dest="keyword", default="", help="only checks whose name matches")
    return parser


def main(phase: int, argv: Sequence[str] | None = None, watched: bool = False) -> int:
    """The command behind ``python test_phaseN.py``; returns the exit status.

    ``watched``: by ``distlab watch``, which has said what is graded, and may end it at any time.
    """
    out = console()
    try:
        with terminable():
            return _run(phase, argv, out, watched)
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


def _run(phase: int, argv: Sequence[str] | None, out: Console, watched: bool) -> int:
    chosen = _phase(phase)
    options = _parser(chosen).parse_args(argv)
    for exercise_id in options.exercises:
        if load_course().exercise(exercise_id).phase.number != phase:
            raise ValueError(f"exercise {exercise_id} is not in phase {phase}")
    find_source(options.impl, chosen)
    for name in filter(None, (options.json, options.junitxml)):
        _check_writable(Path(name))
    return _grade_and_print(chosen, options, out, watched)


def _grade_and_print(
    phase: Phase, options: argparse.Namespace, out: Console, watched: bool
) -> int:
    from .. import progress

    begun = time.monotonic()
    mine = options.impl == "templates"
    known: Iterable[str] = progress.known_passes(phase) if mine and options.exercises else ()
    if options.impl == "solutions":  # taken for themselves, whether they pass or not
        known = {e.id for e in load_course().exercises} - set(options.exercises)
        known = known if options.exercises else ()
    request = Request(
        impl=options.impl,
        device=options.device,
        seed=options.seed,
        exercises=tuple(options.exercises),
        known=frozenset(known),
    )
    if not (out.is_terminal or watched):
        report = run_session(phase, request, options.keyword, options.junitxml or "")
    else:
        asked = options.exercises or [e.id for e in phase.exercises]
        if not watched:
            many = f"{len(asked)} exercises of phase {phase.number}"
            out.print(Text(f"grading {asked[0] if len(asked) == 1 else many} …", "dim"))
        with View(asked) as view:
            report = run_session(phase, request, options.keyword, options.junitxml or "", view)
        out.print()
    if mine:
        for exercise in report.exercises:
            exercise.hints_used = progress.hints_used(exercise.id)
        if not options.keyword:
            report.notes += progress.record(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_json(), indent=2) + "\n")
    print_report(report, phase, out)
    out.print(f"graded in {time.monotonic() - begun:.1f} s", style="dim", highlight=False)
    if not report.exercises:
        raise ValueError(f"no check matches -k {options.keyword!r}")
    return 0 if report.passed else 1


def _check_writable(path: Path) -> None:
    """Fail before grading if a result file can't be written, and lose nothing."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {folder} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{path}: no permission to write there")
