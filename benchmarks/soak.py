"""Grade right code again and again, idle and beside other programs: no verdict may be wrong.

``make soak`` grades the solutions of each phase, and the alternatives on gloo ranks, with new seeds
each time. It grades them alone, and beside three busy processes per core. After each grading it
adds to ``benchmarks/soak.json``, so that it can be stopped and called again. It writes its tables
into ``benchmarks/README.md`` and ``benchmarks/soak.md``. A check whose code or whose subject's code
has changed begins anew. A grading counts as idle only if next to nothing else used the processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from distlab.course.catalogue import load_course, root
from distlab.host.processes import die_with_parent

from . import soak_page
from .machine import Load
from .soak_book import Book, Verdict
from .soak_subjects import Subject, subjects

PER_CORE = 3  # busy processes
DISTURBED = 0.1  # share of the processors that others may use in an idle grading
LIMIT = 2 * 3600.0  # seconds; ends a grading that hangs


# -- one grading ----------------------------------------------------------------------------------
def graded(subject: Subject, seed: int, limit: float = LIMIT) -> list[dict[str, Any]]:
    """``subject.grade(seed)`` in a process of its own; without an answer, one wrong verdict."""
    reading, writing = os.pipe()
    pid = _fork()
    if pid == 0:
        os.close(reading)
        _answer(lambda: subject.grade(seed), writing, limit)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
    except BaseException:
        _end(pid)
        raise
    _, status = os.waitpid(pid, 0)
    if text:
        return json.loads(text)
    how = f"the grader ended with {os.waitstatus_to_exitcode(status)} and without a report"
    return [{"exercise": "", "check": "(grading)", "verdict": "crash", "message": how}]


def _fork() -> int:
    """``os.fork``, for a child that ends with this process.

    An interrupt comes before or after it: inside, Python would lose it.
    """
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
        if pid == 0:
            die_with_parent(parent)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(call: Callable[[], Any], pipe: int, limit: float) -> None:
    """The inside of that process, which never returns."""
    from distlab.virtual import reap_children

    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(limit))
        text = json.dumps(call())
        with os.fdopen(pipe, "w") as file:
            file.write(text)
        status = 0
    finally:
        reap_children()
        os._exit(status)


def _end(pid: int) -> None:
    """Let a grading end its ranks and itself; end it if it doesn't."""
    os.kill(pid, signal.SIGINT)
    for _ in range(100):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """``count`` processes that do nothing but compute; they end with the
    context or with this process."""
    pids = []
    try:
        for _ in range(count):
            pid = _fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                while True:
                    pass
            pids.append(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def soak_once(
    book: Book, subject: Subject, loaded: bool, seed: int, per_core: int = PER_CORE
) -> str:
    """Grade once and note it; returns the line to print."""
    cores, begun = os.cpu_count() or 1, time.monotonic()
    with Load() as load, busy(per_core * cores if loaded else 0):
        found = graded(subject, seed)
    others = load.others / cores
    quiet = others <= DISTURBED
    condition = "loaded" if loaded else "idle" if quiet else "disturbed"
    verdicts = [
        Verdict(
            f"{f['exercise']} {f['check']}".strip(),
            f["verdict"],
            f["message"],
            subject.key(f["exercise"], f["check"]) if f["exercise"] else ["", "", ""],
        )
        for f in found
    ]
    at = datetime.now().isoformat(timespec="seconds")
    book.note(subject.name, verdicts, condition, seed=seed, at=at)
    book.write()
    wrong = [v for v in verdicts if v.wrong]
    line = (
        f"{at}  {subject.name}, {condition}: {len(verdicts)} verdicts, {len(wrong)} wrong; seed "
        f"{seed}, {time.monotonic() - begun:.0f} s, "
        f"load average {load.before:.1f} -> {load.after:.1f}"
    )
    if not loaded:
        line += f", others used {others:.0%} of the processors"
    return "\n".join([line, *(f"    WRONG {v.check}: {v.verdict}: {v.message}" for v in wrong)])


# -- many gradings --------------------------------------------------------------------------------
def keys_of(book: Book, subject: Subject) -> dict[str, list[str]]:
    """The checks of ``subject`` in the book that still exist, with the key of each as it is now."""
    keys = {}
    for check in book.counts.get(subject.name, {}):
        exercise, _, name = check.partition(" ")
        with contextlib.suppress(ValueError, StopIteration):  # it was renamed or removed
            keys[check] = subject.key(exercise, name)
    return keys


def done(book: Book, subject: Subject, condition: str) -> int:
    """How often ``subject`` was graded as it is now."""
    return book.gradings(subject.name, condition, keys_of(book, subject))


def open_goals(
    book: Book, chosen: Sequence[Subject], conditions: Sequence[str]
) -> list[tuple[Subject, str]]:
    """The gradings that are still to do, and their condition; the furthest
    from its goal comes first."""
    ratios = [(done(book, s, c) / s.goal, s, c) for c in conditions for s in chosen]
    ratios.sort(key=lambda one: one[0])
    return [(s, c) for ratio, s, c in ratios if ratio < 1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--phases", type=int, nargs="+", default=[1, 2, 3, 4], metavar="N")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--idle", action="store_true", help="only with nothing beside")
    only.add_argument("--loaded", action="store_true", help="only beside busy processes")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--solutions", action="store_true", help="no alternatives")
    which.add_argument("--alternatives", action="store_true", help="nothing but alternatives")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--gradings", type=int, default=None, help="how many; default: to the goal")
    parser.add_argument("--busy", type=int, default=PER_CORE, help="processes per core")
    parser.add_argument(
        "--report", action="store_true", help="grade nothing: write the tables, print each check"
    )
    parser.add_argument("--book", type=Path, default=root() / "benchmarks" / "soak.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print each grading, write the tables; 1 if a verdict was wrong in this call."""
    options = _parser().parse_args(argv)
    try:
        chosen = subjects(options.phases, not options.solutions)
        book = Book.read(options.book)
    except ValueError as error:
        print(f"make soak: {error}", file=sys.stderr)
        return 2
    if options.alternatives:
        chosen = [s for s in chosen if s.exercise]
    conditions = ["idle"] if options.idle else ["loaded"] if options.loaded else ["idle", "loaded"]
    before, status = len(book.wrong), 0
    try:
        if not options.report:
            _soak(book, chosen, conditions, options)
    except KeyboardInterrupt:
        print("interrupted: the grading that ran does not count; call again to go on")
        status = 130
    everything = subjects([p.number for p in load_course().phases if p.ready], alternatives=True)
    current = {s.name: keys_of(book, s) for s in everything}
    print(soak_page.write(book, current, options.book.parent))
    if options.report:
        print("\n" + soak_page.details(book, current))
    return status or int(len(book.wrong) > before)


def _soak(
    book: Book, chosen: Sequence[Subject], conditions: Sequence[str], options: argparse.Namespace
) -> None:
    import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

    end, number = time.monotonic() + 60 * options.minutes, 0
    while todo := open_goals(book, chosen, conditions):
        for subject, condition in todo:
            if time.monotonic() > end or number == options.gradings:
                return
            seed, loaded = random.randrange(1, 1_000_000), condition == "loaded"
            print(soak_once(book, subject, loaded, seed, options.busy), flush=True)
            number += 1
    print("every goal is met")


if __name__ == "__main__":
    sys.exit(main())
