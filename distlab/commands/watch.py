"""``distlab watch``: grade at every save, from a process that has loaded torch already.

A grading runs in a forked child, so a save or a key press acts at once. The child is killed, and
its ranks end with it. All else that it leaves is ended and removed here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ..course import ahead, progress
from ..course.catalogue import Course, Exercise
from ..host.processes import become_subreaper, children, die_with_parent, end_strays
from ..host.system import fork_obstacle
from . import learn

POLL = 0.05
GRACE = 5.0  # seconds for a grading that must tidy up by itself
KEYS = "g grade   n next   h hint   l list   r reset   q quit"
AGAIN = ("g", " ", "\n", "\r")
LEAVE = ("q", "\x04")  # the end of input as well


def first_open(course: Course) -> Exercise:
    """The first exercise of the learner's track that has not passed; the last one when all have."""
    exercises = ahead.exercises_of(course.exercises, ahead.chosen_track(course))
    entries, _ = progress.load()
    return next(iter(ahead.left(exercises, entries)), exercises[-1])


def watch(course: Course, exercise_id: str | None, out: Console) -> int:
    """Re-grade the exercise whenever its phase's files are saved, until q or Ctrl-C."""
    current = course.exercise(exercise_id) if exercise_id else first_open(course)
    out.print("loading PyTorch, once …", style="dim")
    sys.stdout.flush()
    if fork_obstacle():
        raise ValueError(f"watch forks its graders ({fork_obstacle()}): use python test_phaseN.py")
    _load_what_graders_need()
    from ..grading.lifetime import contained  # start-up time: the message above comes first

    signal.signal(signal.SIGHUP, _leave)  # the terminal is gone; the caller handles SIGTERM
    with contained(), _raw_keys() as has_keys:
        watcher = Watcher(course, current, out, has_keys)
        try:
            return watcher.run()
        finally:
            watcher.stop()
            gc.unfreeze()  # else triton complains at exit about what is left of it


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def _load_what_graders_need() -> None:
    """Import once the modules that each grader needs: graders are forked from here."""
    import pytest  # noqa: F401
    import torch._dynamo

    # start-up time of each grader; this process says first that it loads them
    from ..grading import plugin  # noqa: F401
    from ..host.forking import prepare_to_fork
    from ..observe import recorder  # noqa: F401
    from ..ranks import parent as rank_watch  # noqa: F401

    torch.set_num_threads(1)
    prepare_to_fork()


class Watcher:
    """The exercise that is watched, and the grading that runs, if there is one."""

    def __init__(self, course: Course, current: Exercise, out: Console, has_keys: bool) -> None:
        self.course, self.current, self.out, self.has_keys = course, current, out, has_keys
        self.pid = 0
        self.folder = ""
        self.seen: dict[str, int] = {}
        self.inherits = become_subreaper()  # processes that a grading leaves behind come here
        self.own = children()

    def run(self) -> int:
        """Grade once, again at each save, and whenever a key asks for it."""
        self._start()
        while True:
            key = _key(POLL) if self.has_keys else _pause()
            if key in LEAVE:
                return 0
            if key:
                self._act(key)
            elif _versions(self.current) != self.seen:
                self._start("saved")
            elif self.pid:
                self._finish()

    def _act(self, key: str) -> None:
        """Do at once what a key asks for. A grading that runs is begun anew afterwards."""
        if key not in (*AGAIN, *"nhlr"):
            return
        ran = self.stop()
        if key == "n":
            self.current = _next(self.course, self.current)
        elif key == "h":
            learn.hint(self.current, self.out)
        elif key == "l":
            learn.show_map(self.course, self.out)
        elif key == "r":
            learn.reset(self.current, self.out, ask=lambda: _key(60) == "y")
        if key in AGAIN or key == "n":
            self._start()
        elif ran:
            self._start(clear=False)

    def _start(self, why: str = "", clear: bool = True) -> None:
        """Name the exercise that is graded, and begin."""
        self.stop()
        self.seen = _versions(self.current)
        if clear and self.out.is_terminal:
            self.out.clear()
        name, title = self.current.template_path.name, self.current.title
        head = f"grading {self.current.id} {title} …  ({name}{' was saved' if why else ''})"
        self.out.print(Text(head, "bold"))
        sys.stdout.flush()
        self.folder = tempfile.mkdtemp(prefix="distlab-watch-")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _grade(self.current, parent, self.folder, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _finish(self) -> None:
        """Say how the grading ended, if it has."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return
        self.pid = 0
        self._tidy()
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            text = f"the grading was ended by {signal.Signals(-code).name}; save to grade again"
            self.out.print(Text(text, "bold red"))
        if code == 0 and self.has_keys:
            self.out.print(Text(f"{self.current.id} passes: n for the next one", "bold green"))
        keys = KEYS if self.has_keys else "Ctrl-C to quit"
        self.out.print(Text(f"watching {self.current.template_path.name}   {keys}", "dim"))
        sys.stdout.flush()

    def stop(self) -> bool:
        """End the grading that runs, with all that it has started; returns
        whether there was one."""
        if not self.pid:
            return False
        pid, self.pid = self.pid, 0
        os.kill(pid, signal.SIGKILL if self.inherits else signal.SIGINT)
        end = time.monotonic() + GRACE
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self._tidy()
        if self.out.is_terminal:
            print("\r\x1b[2K", end="", flush=True)  # the line that said what ran
        return True

    def _tidy(self) -> None:
        """End and remove everything that a grading has left: its processes come to this one."""
        end_strays(self.own)
        shutil.rmtree(self.folder, ignore_errors=True)


def _grade(exercise: Exercise, parent: int, folder: str, mask: set[int | signal.Signals]) -> None:
    """The child: grade, print the report, never return."""
    status = 1
    try:
        from ..grading.command import main  # start-up time of the map and other commands

        die_with_parent(parent, signal.SIGTERM)
        tempfile.tempdir = folder
        os.environ["TMPDIR"] = folder
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = main(exercise.phase.number, [exercise.id], watched=True)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    finally:
        os._exit(status)


def _versions(exercise: Exercise) -> dict[str, int]:
    """When the learner's files of the phase were saved last."""
    found = {}
    for path in exercise.template_path.parent.glob("*.py"):
        with contextlib.suppress(OSError):  # an editor may be replacing it right now
            found[str(path)] = path.stat().st_mtime_ns
    return found


def _next(course: Course, current: Exercise) -> Exercise:
    """The one after it in the learner's track; itself if it is the last."""
    later = course.exercises[course.exercises.index(current) + 1 :]
    return next(iter(ahead.exercises_of(later, ahead.chosen_track(course))), current)


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
    """The key pressed within ``seconds``, or an empty string. Arrows and
    similar keys count as none."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    key = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
    if key != "\x1b":
        return key or LEAVE[0]
    last = ""  # "\x1b[1;5A": a sequence ends with a letter or ~
    while select.select([sys.stdin], [], [], 0)[0] and not (last.isalpha() or last == "~"):
        last = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
    return ""


def _pause() -> str:
    time.sleep(POLL)
    return ""
