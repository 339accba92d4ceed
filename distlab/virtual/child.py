"""The inside of a virtual run: a forked process that runs worlds and reports each of them once."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch

from ..host.processes import die_with_parent
from ..observe.lines import learner_line
from ..observe.log import Event
from ..observe.looks import PAUSES, Looks, endless_loop
from ..observe.raised import describe
from ..ranks.context import RankContext
from ..ranks.process import Pipe, content_of
from ..ranks.results import PIPE_LOST
from . import internals
from .communicators import forgiven
from .compute import ComputeModel
from .devices import DeviceModel
from .isolation import enter, entered
from .options import VirtualOptions
from .rules import rules_named
from .scheduler import VirtualRank
from .state import RankState
from .world import RankLost, World

TIME_IS_UP = signal.SIGUSR1  # the parent's word
# bound before learner code runs, because that may replace them in their modules
_exit, _dumps = os._exit, json.dumps
STACK = 16 << 20  # bytes of (virtual) stack per rank


@dataclass
class Child:
    """One forked process; the parent sees in ``who`` the running rank and the world's index."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: VirtualOptions
    world_sizes: tuple[int, ...]
    pipe: Pipe
    who: memoryview

    def run(self, parent: int, output_fd: int) -> NoReturn:
        """Run the worlds one after the other, report each, and end this process."""
        try:
            self._run(parent, output_fd)
        except OSError:
            _exit(PIPE_LOST)
        finally:
            _exit(0)

    def _run(self, parent: int, output_fd: int) -> None:
        try:
            _detach(parent, output_fd)
            _stay_on_one_core()
            gc.set_threshold(50_000, 20, 100)
            gc.freeze()  # what the parent made is not searched again, and its pages stay shared
            signal.signal(TIME_IS_UP, lambda *_: entered().scheduler.over.set())
            for index, world_size in enumerate(self.world_sizes):
                self.who[1] = index
                if not self._explore(world_size):
                    break
        except BaseException as error:
            said = describe(error, self.options.learner_files)
            state = RankData(rank=0, error=said)
            self.pipe.send(b"V", _dumps(vars(state)).encode())
            self.pipe.send(b"F", _dumps({"verdict": "failed"}).encode())

    def _explore(self, world_size: int) -> bool:
        """Run every interleaving. Report the first that fails, or else one
        with different results."""
        options = self.options
        first: list[Any] | None = None
        absent = {options.lose[0]} if options.lose and options.survivable else set()
        if options.only:
            absent |= set(range(world_size)) - set(options.only)
        every = [*itertools.product(rules_named(options.rules), range(options.seeds))]
        for rules, number in every:
            seed = None if options.seed is None else options.seed + number
            world = World(world_size, options, seed, self._note, rules)
            enter(world)
            world.scheduler.run(partial(self._body, world), STACK)
            late = [rank for rank in world.scheduler.ranks if not rank.finished]  # they may go on
            values = [rank.value for rank in world.scheduler.ranks]
            first = first or values
            ended = [v for r, v in enumerate(values) if r not in absent]
            failed = bool(late) or None in ended or any(state.notices for state in world.states)
            if failed or values != first or (rules, number) == every[-1]:
                _report(world, self.pipe, seed, late)
                break
        return not failed

    def _note(self, rank: int) -> None:
        self.who[0] = rank

    def _body(self, world: World, rank: VirtualRank) -> bytes:
        """One rank: its group, its modules, its function; returns the packed result."""
        state, world_size = world.states[rank.index], len(world.states)
        own = f"{world_size}_{world.scheduler.seed}_{rank.index}"  # the name of its modules
        threading.current_thread().virtual_rank = own  # type: ignore[attr-defined]
        torch.autograd.set_multithreading_enabled(False).__enter__()
        torch.set_num_threads(1)  # OpenMP counts per thread: this one would start more
        if world.rules.nccl and self.options.process_group:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if self.options.process_group:
            internals.join_world(rank.index, world_size, world.store)
        device, model = torch.device("cpu"), None
        if world.rules.nccl:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            model = DeviceModel(world.flight(state), partial(world.read, state))
        ctx = RankContext(rank.index, world_size, device, self.options.base_seed)
        ctx.ledger = state.ledger  # type: ignore[assignment]
        if world.modelled:
            state.model = ComputeModel(world, state)
        with state.model or model or contextlib.nullcontext():
            value = self.fn(ctx, *self.args)
        world.finish(state)
        return content_of(value)


def _detach(parent: int, output_fd: int) -> None:
    """Give the child its own session and output; it ends with its parent."""
    os.setsid()
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(fd, target)
    faulthandler.disable()


def _stay_on_one_core() -> None:
    """Keep to one core. One rank runs at a time, and within a core the baton passes in half the
    time.

    In a batch process a woken thread does not push aside the thread that woke it and that still
    holds Python's lock.
    """
    if hasattr(os, "SCHED_BATCH") and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError), open("/proc/self/stat") as stat:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.sched_setaffinity(0, {int(stat.read().rpartition(")")[2].split()[36])})


# -- the report -----------------------------------------------------------------------------------
@dataclass
class RankData:
    """The report on a rank for the parent; ``waiting`` is the index of an event."""

    rank: int
    events: list[Any] | tuple[()] = ()
    waiting: int | None = None
    line: str = ""
    error: dict[str, Any] | None = None
    spans: list[Any] | tuple[()] = ()
    picture_from: float = 0.0
    output: str = ""
    notices: dict[str, Any] | None = None
    reads: list[Any] | tuple[()] = ()


def _report(world: World, pipe: Pipe, seed: int | None, late: list[VirtualRank]) -> None:
    """Everything that the parent needs, rank by rank. ``late``: the ranks that
    were not done at the end."""
    loops = _loops(world)
    frames = sys._current_frames()
    for state in world.states:
        rank = state.rank
        if rank.value is not None and rank not in late:
            pipe.send(b"R", rank.index.to_bytes(4, "little") + rank.value)
        frame = frames.get(rank.thread.ident or 0) if rank.thread else None
        data = _rank_data(world, state, frame)
        pipe.send(b"V", _dumps(vars(data)).encode())
    summary = _summary(world, seed, frames, bool(late)) | {"loops": loops}
    pipe.send(b"F", _dumps(summary).encode())


def _loops(world: World) -> dict[int, str]:
    """The endless loops in which ranks are, if the time limit has ended the run; other
    ranks may wait for them."""
    scheduler = world.scheduler
    left = [rank for rank in scheduler.ranks if rank.thread is not None and not rank.finished]
    if scheduler.deadlocked or world.mismatch is not None or not left:
        return {}
    late = {r.index: world.states[r.index].looks for r in left if r.clock > world.patience}
    asleep = {rank: looks for rank, looks in late.items() if looks.count}  # not: in messages
    looks = asleep or {rank.index: Looks() for rank in left}
    moving = set(asleep)
    before = {rank.index: _position(world, rank) for rank in left}
    for pause in () if asleep else (*PAUSES, 0.0):
        frames = sys._current_frames()
        for rank in left:
            looks[rank.index].take(frames.get(rank.thread.ident or 0) if rank.thread else None)
            if rank is scheduler.running or _position(world, rank) != before[rank.index]:
                moving.add(rank.index)
        threading.Event().wait(pause)
    return {r: endless_loop(**looks[r].data(), learner_files=world.learner_files) for r in moving}


def _position(world: World, rank: VirtualRank) -> tuple[float, int]:
    """A number that changes when the rank communicates, or asks whether an
    operation is complete."""
    return rank.clock, len(world.states[rank.index].ledger.events)


def _summary(
    world: World, seed: int | None, frames: dict[int, FrameType], late: bool
) -> dict[str, Any]:
    """How the run ended, and the numbers of clocks, links and compute models."""
    ranks = world.scheduler.ranks
    verdict = "deadlock" if world.scheduler.deadlocked else "done"
    if verdict == "done" and late:
        verdict = "timeout"
    running = world.scheduler.running
    stacks = {}
    if running is not None and running.thread is not None and not running.finished:
        frame = frames.get(running.thread.ident or 0)
        stacks[running.index] = "".join(reversed(traceback.format_stack(frame)))
    models = [state.model for state in world.states if state.model is not None]
    summary: dict[str, Any] = {
        "verdict": verdict,
        "seed": seed,
        "rules": world.rules.name,
        "stacks": stacks,
        "clocks": [rank.clock for rank in ranks],
        "traffic": world.network.traffic(),
        "unmodelled": {name: n for model in models for name, n in model.unmodelled.items()},
        "peaks": [model.memory.peak for model in models],
        "flops": [model.flops for model in models],
    }
    if world.mismatch is not None:
        parts = world.mismatch.first, world.mismatch.second
        issued = [[p.rank.index, p.event.index if p.event else 0] for p in parts]
        summary |= {"verdict": "mismatch", "message": world.mismatch.message, "parts": issued}
    elif verdict == "deadlock":
        summary["forgiven"] = forgiven(world.scheduler, world.transfers.order)
    return summary


def _rank_data(world: World, state: RankState, frame: FrameType | None) -> RankData:
    rank, ledger = state.rank, state.ledger
    error = None if rank.error is None else describe(rank.error, tuple(world.learner_files))
    if error is not None and isinstance(rank.error, RankLost):
        error["type"] = "lost rank"
    data = RankData(
        rank=rank.index,
        events=[vars(event) for event in ledger.events],
        error=error,
        spans=ledger.raw_spans,
        picture_from=ledger.picture_from,
        output="".join(state.output),
        notices=state.notices,
        reads=state.reads,
    )
    if world.mismatch is not None and not world.record:
        parts = world.mismatch.first, world.mismatch.second
        data.events = [vars(p.describe()) for p in parts if p.rank is rank][:1]
    elif rank.waiting is not None and not rank.finished:
        data.line = learner_line(frame, world.learner_files)
        event = _awaited(rank.waiting, data.line)
        if not any(event is known for known in ledger.events):
            event.index = len(data.events)
        data.waiting = event.index
        if event.index == len(data.events):
            data.events = [*data.events, vars(event)]
    return data


def _awaited(waiting: Any, line: str) -> Event:
    """The event in which a rank waits: an operator, or keys of the store."""
    if isinstance(waiting, list):
        return Event("store", (), None, 0, ", ".join(waiting), 0, 0, 0, 0.0, line=line)
    event: Event = waiting.describe(line)
    return event
