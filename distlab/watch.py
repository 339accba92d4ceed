"""``distlab watch``: grade at every save, from a process that has torch loaded already."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from . import cli, progress
from .course import Course, Exercise
from .processes import die_with_parent
from .system import fork_obstacle

POLL = 0.1
KEYS = "n next   h hint   l list   r reset   q quit"


def first_open(course: Course) -> Exercise:
    """The first exercise that has not passed; the last one when all have."""
    ready = [e for e in course.exercises if e.phase.ready]
    entries, _ = progress.load()
    return next((e for e in ready if entries.get(e.id, {}).get("verdict") != "pass"), ready[-1])


def watch(course: Course, exercise_id: str | None, out: Console) -> int:
    """Re-grade the exercise whenever its phase's files are saved, until q or Ctrl-C."""
    current = course.exercise(exercise_id) if exercise_id else first_open(course)
    if fork_obstacle():
        raise ValueError(f"watch forks its graders ({fork_obstacle()}): use python test_phaseN.py")
    _load_what_graders_need()
    with _raw_keys() as has_keys:
        _grade(current, out, has_keys)
        seen = _versions(current)
        while True:
            key = _key(POLL) if has_keys else _pause()
            if key == "q":
                return 0
            if key == "n":
                current = _next(course, current)
            elif key == "h":
                cli.hint(current, out)
            elif key == "l":
                cli.show_map(course, out)
            elif key == "r":
                _confirm_reset(current, out)
            now = _versions(current)
            if now != seen or key == "n":
                seen = now
                _grade(current, out, has_keys)


def _load_what_graders_need() -> None:
    """Import once what each grader would import: they are forked from here."""
    import pytest  # noqa: F401
    import torch._dynamo

    from . import grading, rank_watch, recorder  # noqa: F401
    from .grading import plugin  # noqa: F401

    torch.set_num_threads(1)


def _grade(exercise: Exercise, out: Console, has_keys: bool) -> None:
    """Grade in a forked child and print its report; Ctrl-C ends the child, too."""
    from .grading import main

    if out.is_terminal:
        out.clear()
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent(parent, signal.SIGTERM)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = main(exercise.phase.number, [exercise.id])
            sys.stdout.flush()
        finally:
            os._exit(status)
    try:
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        os.waitpid(pid, 0)
        raise
    if os.waitstatus_to_exitcode(status) == 0 and has_keys:
        out.print(f"{exercise.id} passes: n for the next one", style="bold green")
    keys = KEYS if has_keys else "Ctrl-C to quit"
    out.print(f"watching {exercise.template_path.name}   {keys}", style="dim", highlight=False)
    sys.stdout.flush()


def _versions(exercise: Exercise) -> dict[str, int]:
    """When the learner's files of the phase were saved last."""
    found = {}
    for path in exercise.template_path.parent.glob("*.py"):
        with contextlib.suppress(OSError):  # an editor may be replacing it right now
            found[str(path)] = path.stat().st_mtime_ns
    return found


def _next(course: Course, current: Exercise) -> Exercise:
    ready = [e for e in course.exercises if e.phase.ready]
    return ready[min(ready.index(current) + 1, len(ready) - 1)]


def _confirm_reset(exercise: Exercise, out: Console) -> None:
    out.print(f"make {exercise.template_path.name} blank again? your file is kept (y/n)")
    if _key(60) == "y":
        cli.reset(exercise, out)


@contextlib.contextmanager
def _raw_keys() -> Iterator[bool]:
    """Single key presses without Enter; False where there is no terminal to read from."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """The key pressed within ``seconds``, or an empty string."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


def _pause() -> str:
    time.sleep(POLL)
    return ""
