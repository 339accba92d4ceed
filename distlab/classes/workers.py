"""Processes that grade, each one submission at a time. A submission can
break only its own process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

from ..host.processes import (
    become_subreaper,
    children,
    die_with_parent,
    end_strays,
    exit_status,
    not_for_children,
)

LOOK = 1.0  # seconds between two looks at the clock
Work = Callable[[int], str]


class _Worker:
    """A forked process that answers each number with the result of ``work``."""

    def __init__(self, work: Work, output: Callable[[int], Path]) -> None:
        self.ours, theirs = Pipe()
        not_for_children.append(self.ours.fileno())
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(parent)
            not_for_children.append(theirs.fileno())
            _serve(theirs, work, output)
        theirs.close()
        self.task: int | None = None
        self.begun = 0.0

    def give(self, task: int) -> None:
        self.task, self.begun = task, time.monotonic()
        with contextlib.suppress(OSError):  # it has ended: the reader of its answer sees that
            self.ours.send_bytes(str(task).encode())

    def end(self) -> int | None:
        """Kill it; returns how it had ended before, if it had."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        status = exit_status(self.pid)
        not_for_children.remove(self.ours.fileno())
        self.ours.close()
        return status


def _serve(theirs: Connection, work: Work, output: Callable[[int], Path]) -> NoReturn:
    """The worker: it prints into a file of the task's own."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            task = int(theirs.recv_bytes())
            with output(task).open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            theirs.send_bytes(work(task).encode("utf-8", "surrogatepass"))
    except EOFError:
        pass
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(1)


def work_off(
    tasks: Sequence[int],
    jobs: int,
    work: Work,
    output: Callable[[int], Path],
    seconds: float,
    begins: Callable[[int], None],
) -> Generator[tuple[int, str, str], None, None]:
    """Each task, as it ends, with its answer or with one line that says why there is none.

    ``begins`` is called for each task. ``output``: the file for everything that is printed
    meanwhile. A worker that dies, or takes more than ``seconds`` for one task, is replaced.
    """
    become_subreaper()
    strangers = children()
    workers: list[_Worker] = []
    left = list(reversed(tasks))
    try:
        while left or workers:
            while left and len(workers) < jobs:
                workers.append(_Worker(work, output))
                _next(workers[-1], left, begins)
            ready = wait([w.ours for w in workers], LOOK)
            for worker in list(workers):
                task = worker.task
                assert task is not None
                answer, problem = "", ""
                if worker.ours in ready:
                    try:
                        answer = worker.ours.recv_bytes().decode("utf-8", "surrogatepass")
                    except (EOFError, OSError):
                        problem = "the grader's process ended"
                elif time.monotonic() - worker.begun > seconds:
                    problem = f"grading took more than {seconds:g} s"
                else:
                    continue
                if problem or not left:
                    workers.remove(worker)
                    worker.end()
                    end_strays(strangers | {w.pid for w in workers})
                if not problem and left:
                    _next(worker, left, begins)
                yield task, answer, problem
    finally:
        for worker in workers:
            worker.end()
        end_strays(strangers)


def _next(worker: _Worker, left: list[int], begins: Callable[[int], None]) -> None:
    begins(left[-1])
    worker.give(left.pop())
