"""Run a function on W virtual ranks: same contract as ``run_ranks``, in one forked child.

The child runs the ranks as threads (``scheduler.py``) and reports once, at the end: results, what
each rank communicated, and for a failure where each rank was. The parent makes the same
RankFailure of it that real ranks would have made, so a learner reads the same words on both tiers.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import mmap
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import gpus, rank_report
from ..ledger import Log
from ..processes import become_subreaper, children, descendants, end_strays, is_ending
from ..program_clock import EVERY, ProgramClock
from ..rank_process import Pipe
from ..rank_watch import KEPT_OUTPUT, Member, Wait
from ..ranks import Options, RankFailure, RankResults
from .child import TIME_IS_UP, Child, Settings
from .cluster import Cluster, load_cluster

GRACE = 5.0  # seconds on its clock that the child may take to report after its time is up


class VirtualResults(RankResults):
    """The W return values with ``logs`` and ``output``, and what the clocks and links say.

    ``clocks``: virtual seconds at which each rank was done. ``traffic``: bytes by kind of link.
    ``unmodelled``: operators without a rule of their own in the compute model, and how often.
    ``peaks``: most bytes of tensors alive on each rank (with a compute model).
    """

    def __init__(
        self, values: list[Any], logs: list[Log], output: list[str], more: dict[str, Any]
    ) -> None:
        super().__init__(values, logs, output)
        self.clocks: list[float] = more["clocks"]
        self.traffic: dict[str, int] = more["traffic"]
        self.unmodelled: dict[str, int] = more["unmodelled"]
        self.peaks: list[int] = more["peaks"]
        self.flops: list[float] = more["flops"]

    @property
    def clock(self) -> float:
        """Virtual seconds until the last rank was done."""
        return max(self.clocks)


def run_virtual(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    cluster: Cluster | str = "laptop",
    seed: int | None = None,
    seeds: int = 1,
    base_seed: int = 0,
    timeout: float = 20.0,
    learner_files: tuple[str, ...] = (),
    ledger: bool = True,
    process_group: bool = True,
    compute: str = "none",
    algorithm: str = "backend",
    lose: tuple[int, int] | None = None,
    survivable: bool = False,
    slow_ranks: dict[int, float] | None = None,
    slow_links: dict[int, float] | None = None,
    only: tuple[int, ...] = (),
) -> VirtualResults:
    """Run ``fn(ctx, *args)`` on ``world_size`` virtual ranks and return what each returned.

    ``cluster``: a description or the name of one; its α and β make the virtual time. ``seed``: None
    simulates in the order of virtual time; a number explores one adversarial interleaving, and
    ``seeds`` as many from there on. The first that fails is raised, and names its seed; else the
    results are those of one that differs from the first, if there is any, for the caller to judge.
    ``compute``: how a rank's clock moves between communications: ``"none"``, ``"roofline"``
    (counted FLOPs and bytes on the cluster's GPU) or ``"measured"`` (this machine's CPU time).
    ``algorithm``: how the backend's all-reduce is timed. ``lose``: (rank, n), that rank disappears
    at its n-th communication, and messages between it and others raise RuntimeError there, as
    gloo's do; ``survivable``: the run does not fail of it, the lost rank's result is None.
    ``slow_ranks``, ``slow_links``: factors by rank. ``base_seed`` seeds the ranks' random state.
    ``only``: run these ranks; every other one is taken to do what one of them does, so that its
    part of a collective comes with theirs, and its result is None. They must not send messages.

    Raises RankFailure as ``run_ranks`` does; deadlocks and mismatches are found without waiting.
    """
    return run_worlds(
        fn,
        (world_size,),
        *args,
        cluster=cluster,
        seed=seed,
        seeds=seeds,
        base_seed=base_seed,
        timeout=timeout,
        learner_files=learner_files,
        ledger=ledger,
        process_group=process_group,
        compute=compute,
        algorithm=algorithm,
        lose=lose,
        survivable=survivable,
        slow_ranks=slow_ranks,
        slow_links=slow_links,
        only=only,
    )[0]


def run_worlds(
    fn: Callable[..., Any],
    world_sizes: Sequence[int],
    *args: Any,
    cluster: Cluster | str = "laptop",
    seed: int | None = None,
    seeds: int = 1,
    slow_ranks: dict[int, float] | None = None,
    slow_links: dict[int, float] | None = None,
    learner_files: tuple[str, ...] = (),
    **options: Any,
) -> list[VirtualResults]:
    """``run_virtual`` for several world sizes in one child: a fork costs more than a small run.

    One more option: ``patience``, the virtual time beyond which a rank's sleep ends the run as a
    hang.
    """
    if min(world_sizes) < 1:
        raise ValueError(f"world_size must be at least 1, got {min(world_sizes)}")
    if seeds < 1 or (seeds > 1 and seed is None):
        raise ValueError("seeds counts the interleavings from a seed on: give a seed as well")
    settings = Settings(
        cluster=load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster,
        world_sizes=tuple(world_sizes),
        seed=seed,
        seeds=seeds,
        learner_files=tuple(learner_files),
        slow_ranks=slow_ranks or {},
        slow_links=slow_links or {},
        **options,
    )
    return _run_child(fn, args, settings)


def _run_child(
    fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings
) -> list[VirtualResults]:
    sys.stdout.flush()
    sys.stderr.flush()
    reap_children(block=False)
    become_subreaper()
    gpus.hide()
    before, parent = children(), os.getpid()
    reading, writing = os.pipe()
    printed, printing = os.pipe()  # what bypasses sys.stdout
    running = mmap.mmap(-1, mmap.PAGESIZE)  # who has the baton in which world, should the child die
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(printed)
        who = memoryview(running).cast("i")
        Child(fn, args, settings, Pipe(writing), who).run(parent, printing)
    os.close(writing)
    os.close(printing)
    _ending.append(pid)
    try:
        reports = _read_reports(pid, reading, printed, settings)
    finally:
        os.close(reading)
        os.close(printed)
        _end(pid, before)
    extra = reports.printed.decode(errors="replace")
    results = []
    options = Options(
        timeout=settings.timeout, ledger=settings.ledger, learner_files=settings.learner_files
    )
    for world_size, report in zip(settings.world_sizes, reports, strict=False):
        members = [Member(rank, pid, -1, -1) for rank in range(world_size)]
        results.append(
            _results(report, members, options, extra, settings.seed, settings.survivable)
        )
    if len(results) < len(settings.world_sizes):
        if pid not in _statuses:  # it was alive, and said nothing in time
            _, _statuses[pid] = os.waitpid(pid, 0)
            _ending.remove(pid)
        rank, place = memoryview(running).cast("i")[:2].tolist()
        members = [Member(rank, pid, -1, -1) for rank in range(settings.world_sizes[place])]
        members[rank].head += extra.encode()
        if reports.ending == "garbled":
            raise rank_report.garbled(rank)
        if reports.ending == "silent":
            for member in members:
                member.idle = member.rank != rank
            raise rank_report.hang(members, {}, options)
        members[rank].status = None if reports.ending == "lives on" else _statuses[pid]
        members[rank].closed = True
        raise rank_report.failure(members, options)
    return results


_ending: list[int] = []  # children that have reported: their exit need not be waited for at once
_statuses: dict[int, int] = {}  # exit status of those that had to be waited for


def _end(pid: int, before: set[int]) -> None:
    """Kill the child; if it has forked, or died by itself, wait for it and for what it left.

    What it has started is below it, or was left by its parent and so has come to this process.
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
Frames = list[tuple[bytes, bytes]]


class _Reports(list[Frames]):
    """One list of frames per world, what was printed, and how it ended if worlds are missing.

    ``ending``: "silent" (too long), "garbled", "died", or "lives on" (without its pipe).
    """

    ending = ""

    def __init__(self) -> None:
        super().__init__()
        self.printed = bytearray()


def _read_reports(pid: int, fd: int, printed: int, settings: Settings) -> _Reports:
    """What the child reports, until it has said all or ends."""
    clock, reports = ProgramClock([pid]), _Reports()
    reader, frames = Member(0, 0, -1, -1), Frames()
    sources: list[int] = [fd, printed]
    told = False
    while len(reports) < len(settings.world_sizes):
        left = settings.timeout - clock.read()
        if left <= 0 and not told:
            told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, TIME_IS_UP)  # it tells where it is
        if left <= -GRACE:
            reports.ending = "silent"
            break
        soon = left if left > 0 else left + GRACE
        ready = select.select(sources, [], [], min(max(soon, EVERY), 0.5))[0]
        if printed in ready:
            data = os.read(printed, 1 << 16)
            reports.printed += data[: KEPT_OUTPUT - len(reports.printed)]
            if not data:  # closed by the learner's code
                sources.remove(printed)
        if fd not in ready:
            continue
        data = os.read(fd, 1 << 20)
        if not data:
            reports.ending = "died" if is_ending(pid) else "lives on"
            break
        reader.buffer += data
        try:
            for frame in reader.frames():
                frames.append(frame)
                if frame[0] == b"F":
                    reports.append(frames)
                    frames = Frames()
        except RankFailure:
            reports.ending = "garbled"
            break
    while select.select([printed], [], [], 0)[0] and len(reports.printed) < KEPT_OUTPUT:
        data = os.read(printed, KEPT_OUTPUT - len(reports.printed))
        if not data:
            break
        reports.printed += data
    return reports


def _results(
    frames: Frames,
    members: list[Member],
    options: Options,
    extra: str,
    first_seed: int | None,
    survivable: bool,
) -> VirtualResults:
    values: list[Any] = [None] * len(members)
    summary: dict[str, Any] = {}
    for kind, content in frames:
        if kind == b"F":
            summary = json.loads(content)
        elif kind == b"R":
            rank = int.from_bytes(content[:4], "little")
            members[rank].result = content
            values[rank] = torch.load(io.BytesIO(content[4:]), weights_only=True)
        else:
            _load(members, json.loads(content))
    members[0].head += extra.encode()
    try:
        with rank_report.defaults_named(members, options):
            _raise_if_failed(summary, members, options, survivable)
    except RankFailure as failure:
        failure.interleaving = summary.get("seed")
        if None not in (failure.interleaving, first_seed) and failure.interleaving != first_seed:
            failure.message += "\n(not in every order of the ranks: other interleavings went well)"
        raise
    return VirtualResults(values, [m.log() for m in members], [m.output for m in members], summary)


def _load(members: list[Member], data: dict[str, Any]) -> None:
    """Take in what one rank did."""
    member = members[data["rank"]]
    for event in data["events"]:
        member.began(event)
    member.error = data["error"]
    member.defaults = data["defaults"]
    member.spans = {"spans": data["spans"], "picture_from": data["picture_from"]}
    member.head += data["output"].encode(errors="backslashreplace")
    if data["waiting"] is not None:
        member.waits[0] = Wait(member.events[data["waiting"]], data["line"], None)


def _raise_if_failed(
    summary: dict[str, Any], members: list[Member], options: Options, survivable: bool
) -> None:
    verdict = summary["verdict"]
    if verdict == "mismatch":
        first, second = ((r, members[r].events[i]) for r, i in summary["parts"])
        found = (first[0], second[0], first[1], second[1])
        raise rank_report.mismatch(members, found, options, summary["message"])
    for member in members if survivable else ():
        if member.error is not None and member.error["type"] == "lost rank":
            member.error = None
    if any(m.error is not None for m in members):
        raise rank_report.failure(members, options)
    if verdict != "done":
        stacks = {int(rank): text for rank, text in summary["stacks"].items()}
        loops = {int(rank): place for rank, place in summary["loops"].items()}
        for member in members:
            member.loop = loops.get(member.rank, "")
            member.idle = member.rank not in stacks
        raise rank_report.hang(members, stacks, options, proven=verdict == "deadlock")
