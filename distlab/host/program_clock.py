"""How long a program would have run by now on a machine that does nothing else.

A limit must end a program that hangs, and spare one that is only slow because other programs have
the processors. The kernel counts for each thread how long it has run, and how long it was ready and
had to wait for a processor (/proc/PID/schedstat). So of every stretch of time the clock counts

- all of it except the time in which threads ran or waited for a processor: a hanging program sleeps
  all the time;
- at least the time that its busiest process ran, and the time of all its processes over the number
  of processors: an endless loop runs whenever it may;
- at least a tenth, so that everything ends.

A thread that waits for a disk does not sleep. Where the system tells none of this, it is the
ordinary clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PROC = Path("/proc")
EVERY = 0.1  # seconds between two looks
LEAST = 0.1  # of the time counts in any case
_spent = 0.0


def spent() -> float:
    """Seconds on the clocks of all programs that this process has watched."""
    return _spent


class ProgramClock:
    """The clock of the processes ``pids`` and of all that they start; it begins at 0."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids, self.seconds = tuple(pids), 0.0
        self.at, self.before = time.monotonic(), self._threads()

    def read(self) -> float:
        """The seconds so far; to be called several times a second."""
        global _spent
        passed = time.monotonic() - self.at
        if passed >= EVERY:
            now = self._threads()
            counted = self._counted(passed, now)
            self.seconds, _spent = self.seconds + counted, _spent + counted
            self.at, self.before = self.at + passed, now
        return self.seconds

    def _counted(self, passed: float, now: dict[tuple[int, str], tuple[float, float]]) -> float:
        if not now:
            return passed
        ran: dict[int, float] = {}
        waited = 0.0
        for thread, (run, wait) in now.items():
            run_before, wait_before = self.before.get(thread, (0.0, 0.0))
            ran[thread[0]] = ran.get(thread[0], 0.0) + run - run_before
            waited += wait - wait_before
        working = sum(ran.values())
        asleep = passed - working - waited
        if asleep > LEAST * passed and any(map(_on_disk, ran)):
            asleep = 0.0
        cores = len(os.sched_getaffinity(0))
        return min(passed, max(LEAST * passed, asleep, max(ran.values()), working / cores))

    def _threads(self) -> dict[tuple[int, str], tuple[float, float]]:
        """Seconds run and waited for a processor, by process and thread."""
        found, todo = {}, list(self.pids)
        while todo:
            pid = todo.pop()
            for task in _tasks(pid):
                ran, waited, *_ = [*_words(task / "schedstat"), "", ""]
                if waited:
                    found[pid, task.name] = int(ran) / 1e9, int(waited) / 1e9
                todo += map(int, _words(task / "children"))
        return found


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until the condition holds; False if it does not within so many seconds
    of this program's clock."""
    clock = ProgramClock([os.getpid()])
    while not condition():
        if clock.read() > seconds:
            return False
        time.sleep(0.01)
    return True


def _tasks(pid: int) -> list[Path]:
    try:
        return list((PROC / str(pid) / "task").iterdir())
    except OSError:  # it has ended, or there is no /proc
        return []


def _on_disk(pid: int) -> bool:
    """Whether a thread of the process waits for a disk."""
    return any("D" in _words(task / "stat")[2:3] for task in _tasks(pid))


def _words(path: Path) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except OSError:
        return []
