"""Run a function on W virtual ranks: same contract as ``run_ranks``, in one forked child.

The child runs the ranks as threads (``scheduler.py``) and reports once, at the end: results, each
rank's communication, and for a failure where each rank was. The parent makes of it the same
RankFailure as for real ranks, so a learner reads the same words on both tiers.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..host import gpus
from ..host.processes import become_subreaper, children, descendants, end_strays
from ..ranks.member import Member
from ..ranks.process import Pipe
from ..ranks.report import failure, hang
from ..ranks.results import RankFailure, garbled
from .child import Child
from .options import VirtualOptions
from .reports import VirtualResults, read_reports, results_of


def run_virtual(
    fn: Callable[..., Any], world_size: int, *args: Any, **options: Any
) -> VirtualResults:
    """Run ``fn(ctx, *args)`` on ``world_size`` virtual ranks and return the result of each.

    ``options``: the fields of ``VirtualOptions``.

    Raises RankFailure as ``run_ranks`` does; deadlocks and mismatches are found without waiting.
    """
    return run_worlds(fn, (world_size,), *args, **options)[0]


def run_worlds(
    fn: Callable[..., Any], world_sizes: Sequence[int], *args: Any, **options: Any
) -> list[VirtualResults]:
    """``run_virtual`` for several world sizes in one child: a fork costs more than a small run."""
    if min(world_sizes) < 1:
        raise ValueError(f"world_size must be at least 1, got {min(world_sizes)}")
    chosen = VirtualOptions(**options)
    return _run_child(fn, args, tuple(world_sizes), replace(chosen, cluster=chosen.machine()))


def _run_child(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_sizes: tuple[int, ...],
    options: VirtualOptions,
) -> list[VirtualResults]:
    sys.stdout.flush()
    sys.stderr.flush()
    reap_children(block=False)
    become_subreaper()
    gpus.hide()
    before, parent = children(), os.getpid()
    reading, writing = os.pipe()
    printed, printing = os.pipe()  # what bypasses sys.stdout
    who = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("i")  # has the baton in which world
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(printed)
        Child(fn, args, options, world_sizes, Pipe(writing), who).run(parent, printing)
    os.close(writing)
    os.close(printing)
    _ending.append(pid)
    try:
        reports = read_reports(pid, (reading, printed), len(world_sizes), options, lambda: who[2])
    finally:
        os.close(reading)
        os.close(printed)
        _end(pid, before)
    extra = reports.printed.decode(errors="replace")
    options = replace(options, timeout=reports.limit)  # what a hang is told with
    results = [
        results_of(report, [Member(rank, pid, -1, -1) for rank in range(size)], options, extra)
        for size, report in zip(world_sizes, reports, strict=False)
    ]
    if len(results) < len(world_sizes):
        rank, index = who[:2].tolist()
        members = [Member(r, pid, -1, -1) for r in range(world_sizes[index])]
        members[rank].head += extra.encode()
        raise _without_report(members, rank, reports.ending, options)
    return results


def _without_report(
    members: list[Member], running: int, ending: str, options: VirtualOptions
) -> RankFailure:
    """Why a world has no report: the end of the child while rank ``running`` had the baton."""
    pid = members[running].pid
    if pid not in _statuses:  # it was alive, and said nothing in time
        _, _statuses[pid] = os.waitpid(pid, 0)
        _ending.remove(pid)
    if ending == "garbled":
        return garbled(running)
    if ending == "silent":
        for member in members:
            member.idle = member.rank != running
        return hang(members, {}, options)
    members[running].status = None if ending == "lives on" else _statuses[pid]
    members[running].closed = True
    return failure(members, options)


_ending: list[int] = []  # children that have reported: their exit need not be waited for at once
_statuses: dict[int, int] = {}  # exit status of those that had to be waited for


def _end(pid: int, before: set[int]) -> None:
    """Kill the child; if it has forked, or died by itself, wait for it and for its processes.

    Its processes are below it, or have lost their parents and so have come to this process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # some say EPERM of a zombie's
        os.killpg(pid, signal.SIGSTOP)  # from here on it can't fork
    left = descendants(pid)
    dead, status = os.waitpid(pid, os.WNOHANG)
    for each in (pid, *left):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
    if not dead and not left and children() <= {*before, pid}:
        return
    if not dead:
        _, status = os.waitpid(pid, 0)
    _ending.remove(pid)
    _statuses[pid] = status
    end_strays(before)


def reap_children(block: bool = True) -> None:
    """Collect the children that have ended; a process that leaves by ``os._exit`` must call it."""
    for pid in list(_ending):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, 0 if block else os.WNOHANG)[0] == 0:
                continue
        _ending.remove(pid)


atexit.register(reap_children)
