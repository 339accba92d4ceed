"""Processes that must not outlive a run: ranks, and all that the learner's code has started.

Two promises of the kernel make it possible (Linux, ``man 2 prctl``). A rank asks to be killed when
its parent dies (PR_SET_PDEATHSIG). And the grader is a *subreaper* (PR_SET_CHILD_SUBREAPER): when
the parent of a process dies, the process becomes the grader's child. That holds for any number of
forks, and also in a session of its own. So every process that a rank leaves behind ends up in the
list of the grader's children, from where ``end_strays`` kills it.

A system without these (macOS) ends what has a rank's group id only: a daemon that has made a
session of its own lives on there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator

from . import system

PDEATHSIG, CHILD_SUBREAPER = 1, 36
ROUNDS = 1000  # generations of processes that ``end_strays`` kills before it gives up
PATIENCE = 5.0  # seconds that a killed process may take to be gone
TERMINATED = 128 + signal.SIGTERM
_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat, include/linux/sched.h


def become_subreaper() -> bool:
    """Let processes that children leave behind come to this process;
    returns whether that worked."""
    return system.prctl(CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get the signal when ``parent`` dies; at once if it has died already."""
    if system.prctl(PDEATHSIG, number) and os.getppid() != parent:
        os.kill(os.getpid(), number)


def children() -> set[int]:
    """The children of this process, zombies as well; empty where the system does not tell."""
    return set(_children_of(os.getpid()))


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` and its children have started."""
    found = _children_of(pid)
    return found + [below for each in list(found) for below in descendants(each)]


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    tasks: list[str] = []
    with contextlib.suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
                return _children_by_parent(pid)  # the kernel was built without that file
        except OSError:
            continue  # the thread has just ended
    return found


def _children_by_parent(pid: int) -> list[int]:
    every = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [each for each in every if _stat(each)[1:2] == [str(pid)]]


def _stat(pid: int) -> list[str]:
    """The fields after the name in /proc/PID/stat: state, parent …; empty
    without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_ending(pid: int) -> bool:
    """Whether the process has ended, or is on its way and cannot run any code of its own."""
    fields = _stat(pid)
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def exit_status(pid: int) -> int | None:
    """The status of a child whose pipe is closed; None if it lives on without its pipe."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            gone, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if gone:
            return status
        if not is_ending(pid):
            return None
        time.sleep(0.001)
    return None


def forget_descriptors(kept: Collection[int]) -> None:
    """For a forked child: close the parent's open files to code that runs here.

    Each descriptor leads to nowhere from now on, instead of being free: an object that still has
    its number can't close another file. A descriptor that the system does not list stays open.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    with contextlib.suppress(FileNotFoundError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in kept and fd != nowhere:
                with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                    os.fstat(fd)
                    os.dup2(nowhere, fd)
    os.close(nowhere)


def end_strays(expected: Collection[int]) -> list[int]:
    """Kill every process that has become this one's child, except for the children ``expected``.

    Returns those that could not be ended. Costs one read of a file when there are none. A killed
    process can fork no more, and it is gone only after its own children have come here. So each
    round ends a whole generation, and the next round finds the processes that it had started
    meanwhile. Daemons that replace each other faster than that are given up after ``ROUNDS``
    generations.
    """
    stubborn: set[int] = set()
    for _ in range(ROUNDS):
        strays = children() - set(expected) - stubborn
        if not strays:
            return sorted(stubborn)
        for pid in strays:
            for each in (pid, *descendants(pid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
        stubborn |= {pid for pid in strays if not _reap(pid)}
    return sorted(stubborn | (children() - set(expected)))


def _reap(pid: int) -> bool:
    """Wait for a killed child; False if it does not end (it runs with another user's rights)."""
    end = time.monotonic() + PATIENCE
    pause = 0.0001
    while time.monotonic() < end:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return False


not_for_children: list[int] = []  # pipes of which a forked process must not hold an end


def _let_go() -> None:
    while not_for_children:
        os.close(not_for_children.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: pytest and the runs of ranks end as at Ctrl-C."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside. A second SIGTERM, while processes are
    being ended, is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
