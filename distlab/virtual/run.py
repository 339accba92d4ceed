"""Run a function on W virtual ranks: same contract as ``run_ranks``, in one forked child.

The child runs the ranks as threads (``scheduler.py``) and reports once, at the end: results, what
each rank communicated, and for a failure where each rank was. The parent makes the same
RankFailure of it that real ranks would have made, so a learner reads the same words on both tiers.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import rank_report
from ..ledger import Log
from ..rank_process import Pipe, _describe, _readable
from ..rank_watch import Member
from ..ranks import Options, RankContext, RankFailure, RankResults
from . import internals
from .cluster import Cluster, Network, load_cluster
from .compute import ComputeModel
from .scheduler import VirtualRank
from .world import RankLost, RankState, World

STACK = 1 << 20  # bytes of stack per rank: 256 ranks must fit
GRACE = 2.0  # seconds that the child may take to report after its time is up


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How virtual ranks are run; see ``run_virtual``."""

    cluster: Cluster
    seed: int | None
    base_seed: int
    timeout: float
    learner_files: tuple[str, ...]
    ledger: bool
    process_group: bool
    compute: str
    algorithm: str
    lose: tuple[int, int] | None
    slow_ranks: dict[int, float]
    slow_links: dict[int, float]


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
    slow_ranks: dict[int, float] | None = None,
    slow_links: dict[int, float] | None = None,
) -> VirtualResults:
    """Run ``fn(ctx, *args)`` on ``world_size`` virtual ranks and return what each returned.

    ``cluster``: a description or the name of one; its α and β make the virtual time. ``seed``: None
    simulates in the order of virtual time; a number explores one adversarial interleaving, and
    ``seeds`` as many from there on, until one fails (the message names it). ``compute``: how a
    rank's clock moves between communications: ``"none"``, ``"roofline"`` (counted FLOPs and bytes on
    the cluster's GPU) or ``"measured"`` (this machine's CPU time). ``algorithm``: how the backend's
    all-reduce is timed. ``lose``: (rank, n), that rank disappears at its n-th communication.
    ``slow_ranks``, ``slow_links``: factors by rank. ``base_seed`` seeds the ranks' random state.

    Raises RankFailure as ``run_ranks`` does; deadlocks and mismatches are found without waiting.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if seeds < 1 or (seeds > 1 and seed is None):
        raise ValueError("seeds counts the interleavings from a seed on: give a seed as well")
    settings = Settings(
        cluster=load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster,
        seed=seed,
        base_seed=base_seed,
        timeout=timeout,
        learner_files=tuple(learner_files),
        ledger=ledger,
        process_group=process_group,
        compute=compute,
        algorithm=algorithm,
        lose=lose,
        slow_ranks=slow_ranks or {},
        slow_links=slow_links or {},
    )
    deadline = time.monotonic() + timeout
    for number in range(seeds):
        left = max(1.0, deadline - time.monotonic())
        each = Settings(**vars(settings) | {"timeout": left})
        if seed is not None:
            each = Settings(**vars(each) | {"seed": seed + number})
        try:
            results = _run_child(fn, world_size, args, each)
        except RankFailure as failure:
            if seeds > 1:
                failure.message += f"\n(interleaving {seed + number}; it repeats with that seed)"
            raise
    return results


def _run_child(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], settings: Settings
) -> VirtualResults:
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    running = mmap.mmap(-1, mmap.PAGESIZE)  # the rank that has the baton, should the child die
    with tempfile.TemporaryFile() as spill:  # what bypasses sys.stdout
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(fn, world_size, args, settings, writing, running, spill.fileno())
        os.close(writing)
        try:
            frames = _read_frames(reading, time.monotonic() + settings.timeout + GRACE)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        spill.seek(0)
        extra = spill.read(1 << 16).decode(errors="replace")
    members = [Member(rank, pid, -1, -1) for rank in range(world_size)]
    options = Options(
        timeout=settings.timeout, ledger=settings.ledger, learner_files=settings.learner_files
    )
    if frames is None or not frames or frames[-1][0] != b"F":
        members[int.from_bytes(running[:4], "little") % world_size].head += extra.encode()
        raise _died(members, int.from_bytes(running[:4], "little"), status, frames, options)
    return _results(frames, members, options, extra)


def _read_frames(fd: int, deadline: float) -> list[tuple[bytes, bytes]] | None:
    """All frames until the child closes the pipe; None if it takes too long."""
    import select

    reader = Member(0, 0, -1, -1)
    frames: list[tuple[bytes, bytes]] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        data = os.read(fd, 1 << 20)
        if not data:
            return frames
        reader.buffer += data
        frames += reader.frames()
        if frames and frames[-1][0] == b"F":
            return frames


def _died(
    members: list[Member],
    rank: int,
    status: int,
    frames: list[tuple[bytes, bytes]] | None,
    options: Options,
) -> RankFailure:
    """The child ended or had to be ended without a report."""
    if frames is None:
        return rank_report.hang(members, {}, options)
    members[rank].closed, members[rank].status = True, status
    return rank_report.failure(members, options)


def _results(
    frames: list[tuple[bytes, bytes]], members: list[Member], options: Options, extra: str
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
    _raise_if_failed(summary, members, options)
    return VirtualResults(values, [m.log() for m in members], [m.output for m in members], summary)


def _load(members: list[Member], data: dict[str, Any]) -> None:
    """Take in what one rank did."""
    member = members[data["rank"]]
    for event in data["events"]:
        member.began(event)
    member.error = data["error"]
    member.spans = {"spans": data["spans"], "picture_from": data["picture_from"]}
    member.head += data["output"].encode()
    if data["waiting"] is not None:
        member.waiting = member.events[data["waiting"]]
        member.waiting_line = data["line"]


def _raise_if_failed(summary: dict[str, Any], members: list[Member], options: Options) -> None:
    verdict = summary["verdict"]
    if verdict == "mismatch":
        first, second = ((r, members[r].events[i]) for r, i in summary["parts"])
        found = (first[0], second[0], first[1], second[1])
        raise rank_report.mismatch(members, found, options, summary["message"])
    if any(m.error is not None for m in members):
        raise rank_report.failure(members, options)
    if verdict != "done":
        stacks = {int(rank): text for rank, text in summary["stacks"].items()}
        raise rank_report.hang(members, stacks, options, proven=verdict == "deadlock")


# -- in the child -------------------------------------------------------------------------------
def _child(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    settings: Settings,
    pipe_fd: int,
    running: mmap.mmap,
    output_fd: int,
) -> None:
    """Run the ranks, report, and end this process."""
    pipe = Pipe(pipe_fd)
    try:
        _detach(output_fd)
        _stay_on_one_core()
        gc.set_threshold(50_000, 20, 100)
        gc.freeze()  # what the parent made is not looked through again, and its pages stay shared
        network = Network(settings.cluster, settings.algorithm, settings.slow_links)
        world = World(
            world_size,
            network,
            seed=settings.seed,
            base_seed=settings.base_seed,
            learner_files=settings.learner_files,
            record=settings.ledger,
            measured=1.0 if settings.compute == "measured" else 0.0,
            modelled=settings.compute == "roofline",
            lose=settings.lose,
            slow_ranks=settings.slow_ranks,
        )
        models: dict[int, ComputeModel] = {}
        body = _body(world, models, fn, args, world_size, settings, running)
        timer = threading.Timer(settings.timeout, world.scheduler.over.set)
        timer.daemon = True
        timer.start()
        world.scheduler.run(body, STACK)
        _report(world, models, pipe, settings)
    except BaseException as error:
        traceback.print_exc()
        described = _describe(error, settings.learner_files)
        data = {"rank": 0, "events": [], "error": described, "spans": [], "picture_from": 0.0}
        pipe.send(b"V", json.dumps(data | {"output": "", "waiting": None, "line": ""}).encode())
        pipe.send(b"F", json.dumps({"verdict": "failed"}).encode())
    finally:
        os._exit(0)


def _detach(output_fd: int) -> None:
    """Own session, own output, ends with its parent."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, target)
    faulthandler.disable()


def _stay_on_one_core() -> None:
    """One rank runs at a time: handing the baton over within a core takes half the time.

    As a batch process a thread that is woken does not push aside the one that woke it and only
    then lets go of Python's lock.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError), open("/proc/self/stat") as stat:
            os.sched_setaffinity(0, {int(stat.read().rpartition(")")[2].split()[36])})


def _body(
    world: World,
    models: dict[int, ComputeModel],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    settings: Settings,
    running: mmap.mmap,
) -> Callable[[VirtualRank], bytes]:
    install, number = world.install, memoryview(running).cast("i")

    def install_and_note(rank: VirtualRank) -> None:
        number[0] = rank.index
        install(rank)

    world.scheduler.install = install_and_note

    def body(rank: VirtualRank) -> bytes:
        state = world.states[rank.index]
        threading.current_thread().virtual_rank = rank.index  # type: ignore[attr-defined]
        torch.autograd.set_multithreading_enabled(False).__enter__()
        if settings.process_group:
            internals.join_world(rank.index, world_size, world.store)
        ctx = RankContext(rank.index, world_size, torch.device("cpu"), settings.base_seed)
        ctx.ledger = state.ledger  # type: ignore[assignment]
        model = ComputeModel(world, state) if settings.compute == "roofline" else None
        if model is None:
            value = fn(ctx, *args)
        else:
            models[rank.index] = model
            with model:
                value = fn(ctx, *args)
        world.finish(state)
        return _packed(value)

    return body


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    content = buffer.getvalue()
    _readable(content)
    return content


def _report(
    world: World, models: dict[int, ComputeModel], pipe: Pipe, settings: Settings
) -> None:
    """Everything the parent needs, rank by rank."""
    frames = sys._current_frames()
    stuck: dict[int, str] = {}
    for state in world.states:
        rank = state.rank
        if rank.value is not None:
            pipe.send(b"R", rank.index.to_bytes(4, "little") + rank.value)
        frame = frames.get(rank.thread.ident or 0) if rank.thread else None
        if rank is world.scheduler.running and frame is not None:
            stuck[rank.index] = "".join(reversed(traceback.format_stack(frame)))
        pipe.send(b"V", json.dumps(_rank_data(world, state, frame)).encode())
    verdict = "deadlock" if world.scheduler.deadlocked else "done"
    if verdict == "done" and not all(s.rank.finished for s in world.states):
        verdict = "timeout"
    summary: dict[str, Any] = {
        "verdict": verdict,
        "stacks": stuck,
        "clocks": [s.rank.clock for s in world.states],
        "traffic": world.network.traffic(),
        "unmodelled": {},
        "peaks": [models[r].memory.peak for r in sorted(models)],
        "flops": [models[r].flops for r in sorted(models)],
    }
    for model in models.values():
        summary["unmodelled"] |= model.unmodelled
    if world.mismatch is not None:
        summary["verdict"], summary["message"] = "mismatch", world.mismatch.message
        parts = world.mismatch.first, world.mismatch.second
        summary["parts"] = [[p.rank.index, _index(world, p)] for p in parts]
    pipe.send(b"F", json.dumps(summary).encode())


def _index(world: World, part: Any) -> int:
    """Where the event of ``part`` stands among those that the rank reports."""
    return part.event.index if part.event is not None else 0


def _rank_data(world: World, state: RankState, frame: Any) -> dict[str, Any]:
    from ..lines import learner_line

    rank, ledger = state.rank, state.ledger
    events = [vars(event) for event in ledger.events]
    waiting, line = None, ""
    part = rank.waiting
    if part is not None and not rank.finished and hasattr(part, "describe"):
        line = learner_line(frame, world.learner_files)
        if part.event is None:
            events.append(vars(part.describe(line)))
            waiting = len(events) - 1
        else:
            waiting = part.event.index
    if world.mismatch is not None and not world.record:
        parts = world.mismatch.first, world.mismatch.second
        events = [vars(p.describe()) for p in parts if p.rank is rank][:1] or events
    error = rank.error
    described = None if error is None else _describe(error, tuple(world.learner_files))
    if isinstance(error, RankLost) and described is not None:
        described["type"] = "lost rank"
    return {
        "rank": rank.index,
        "events": events,
        "waiting": waiting,
        "line": line,
        "error": described,
        "spans": ledger.raw_spans,
        "picture_from": ledger.picture_from,
        "output": "".join(state.output),
    }
