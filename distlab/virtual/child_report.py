"""The report on one world of a virtual run: rank by rank, and how it ended."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ..observe.lines import learner_line
from ..observe.log import Event
from ..observe.looks import PAUSES, Looks, endless_loop
from ..observe.raised import describe
from ..ranks.process import Pipe
from .communicators import forgiven
from .scheduler import VirtualRank
from .state import RankState
from .world import RankLost, World

_dumps = json.dumps  # learner code, which runs later, may replace it in its module


@dataclass
class RankData:
    """The report on a rank for the parent; ``waiting`` is the index of an event. In events a group
    is its position in ``groups``: one of thousands of ranks has as many numbers."""

    rank: int
    groups: list[tuple[int, ...]] = field(default_factory=list)
    events: list[Any] | tuple[()] = ()
    waiting: int | None = None
    line: str = ""
    error: dict[str, Any] | None = None
    spans: list[Any] | tuple[()] = ()
    picture_from: float = 0.0
    output: str = ""
    notices: dict[str, Any] | None = None
    reads: list[Any] | tuple[()] = ()


def report(world: World, pipe: Pipe, seed: int | None, late: list[VirtualRank]) -> None:
    """Everything that the parent needs, rank by rank. ``late``: the ranks that
    were not done at the end."""
    loops = _loops(world)
    frames = sys._current_frames()
    for state in world.states.values():
        rank = state.rank
        if rank.value is not None and rank not in late:
            pipe.send(b"R", rank.index.to_bytes(4, "little") + rank.value)
        frame = frames.get(rank.thread.ident or 0) if rank.thread else None
        data = _rank_data(world, state, frame)
        data.events = _with_group_numbers(data)
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
    models = [s.model for s in world.states.values() if s.model is not None]
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


def _with_group_numbers(data: RankData) -> list[Any]:
    numbers: dict[int, int] = {}  # by the identity of a group
    events = []
    for event in data.events:
        group = event["group"]
        if id(group) not in numbers:
            numbers[id(group)] = len(data.groups)
            data.groups.append(group)
        events.append({**event, "group": numbers[id(group)]})
    return events


def _awaited(waiting: Any, line: str) -> Event:
    """The event in which a rank waits: an operator, or keys of the store."""
    if isinstance(waiting, list):
        return Event("store", (), None, 0, ", ".join(waiting), 0, 0, 0, 0.0, line=line)
    event: Event = waiting.describe(line)
    return event
