"""Where two recorded runs first differ.

Each rank's communications are compared one by one. A difference spreads: what a rank received wrong
it passes on. So the first one is looked for over all ranks by *logical time* (Lamport 1978): an
event comes after the one before it on its rank, a receive after its send, and a collective is at
one time on all its ranks. What causes another thing has the smaller time, on whatever clocks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .log import P2P, Event, channel_of
from .runs import RankRun

MOST_ROUNDS = 1000  # of ranks that call collectives in different orders no time would be right


@dataclass(frozen=True)
class Difference:
    """The first difference on one rank: ``index`` counts its communications from 0."""

    rank: int
    index: int
    what: str  # rank, count, operator, shape, value
    op: str
    line: str
    text: str
    time: int


def differences(one: Sequence[RankRun], other: Sequence[RankRun], rtol: float) -> list[Difference]:
    """The first difference of each rank that has one, by logical time in ``one``.

    ``rtol``: numbers that differ by no more, relative to the larger one, count as equal.
    """
    times = logical_times(one)
    theirs = {run.rank: run.events for run in other}
    mine = {run.rank: run.events for run in one}
    found = [
        Difference(rank, 0, "rank", "", "", _alone(rank, rank in mine), 0)
        for rank in sorted({*mine} ^ {*theirs})
    ]
    for rank in sorted({*mine} & {*theirs}):
        first = _first(mine[rank], theirs[rank], rtol)
        if first is not None:
            index, what, text = first
            events = mine[rank] if index < len(mine[rank]) else theirs[rank]
            last = len(mine[rank]) - 1
            time = times.get((rank, min(index, last)), 0) + (index > last)
            event = events[index]
            found.append(Difference(rank, index, what, event.op, event.line, text, time))
    return sorted(found, key=lambda d: (d.time, d.rank))


def _alone(rank: int, in_first: bool) -> str:
    return f"rank {rank} is in the {'first' if in_first else 'second'} run only"


def _first(
    mine: Sequence[Event], theirs: Sequence[Event], rtol: float
) -> tuple[int, str, str] | None:
    """(index, kind, words) of the first pair that differs."""
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        told = _unlike(a, b, rtol)
        if told is not None:
            return index, *told
    if len(mine) == len(theirs):
        return None
    index = min(len(mine), len(theirs))
    longer, events = ("first", mine) if len(mine) > len(theirs) else ("second", theirs)
    return index, "count", f"only the {longer} run goes on: {events[index]}"


def _unlike(a: Event, b: Event, rtol: float) -> tuple[str, str] | None:
    if (a.op, a.group, a.peer, a.tag) != (b.op, b.group, b.peer, b.tag):
        return "operator", f"{_whole(a)} in the first run, {_whole(b)} in the second"
    if (a.numel, a.dtype) != (b.numel, b.dtype):
        return "shape", f"{a} in the first run, {b} in the second"
    text = _unlike_values(a.value, b.value, rtol)
    return None if text is None else ("value", text)


def _whole(event: Event) -> str:
    ranks = ", ".join(map(str, event.group))
    return f"{event} (tag {event.tag}, group of ranks {ranks})"


def _unlike_values(a: Any, b: Any, rtol: float) -> str | None:
    """The first element that differs, or the sums where it lies behind those that were kept."""
    if a is None or b is None or a["digest"] == b["digest"]:
        return None
    for k, (x, y) in enumerate(zip(a["first"], b["first"], strict=False)):
        if not _close(x, y, rtol):
            return f"element {k} is {x} in the first run, {y} in the second"
    if rtol and _close(a["sum"], b["sum"], rtol):
        return None
    return (
        f"an element behind the first {len(a['first'])} differs; the sum is {a['sum']} in the "
        f"first run, {b['sum']} in the second"
    )


def _close(x: float, y: float, rtol: float) -> bool:
    same = x == y or (math.isnan(x) and math.isnan(y))
    return same or math.isclose(x, y, rel_tol=rtol, abs_tol=0.0)


def logical_times(runs: Sequence[RankRun]) -> dict[tuple[int, int], int]:
    """(rank, index) → the event's logical time."""
    times = {(run.rank, k): k for run in runs for k in range(len(run.events))}
    together = _collectives(runs)
    messages = _messages(runs)
    for _ in range(MOST_ROUNDS):
        before = dict(times)
        for run in runs:
            for k in range(1, len(run.events)):
                times[run.rank, k] = max(times[run.rank, k], times[run.rank, k - 1] + 1)
        for keys in together:
            latest = max(times[key] for key in keys)
            times.update(dict.fromkeys(keys, latest))
        for send, receive in messages:
            times[receive] = max(times[receive], times[send] + 1)
        if times == before:
            break
    return times


Key = tuple[int, int]


def _collectives(runs: Sequence[RankRun]) -> list[list[Key]]:
    """The calls that belong together: the k-th of a group on each of its ranks."""
    together: dict[Any, list[Key]] = defaultdict(list)
    for run in runs:
        issued: Counter[Any] = Counter()
        for k, event in enumerate(run.events):
            if event.op not in P2P:
                channel = channel_of(event)
                together[channel, issued[channel]].append((run.rank, k))
                issued[channel] += 1
    return list(together.values())


def _messages(runs: Sequence[RankRun]) -> list[tuple[Key, Key]]:
    """Each send with its receive: the k-th of one rank to another with the same tag and group."""
    sends: dict[Any, list[Key]] = defaultdict(list)
    receives: dict[Any, list[Key]] = defaultdict(list)
    for run in runs:
        for k, event in enumerate(run.events):
            if event.op in P2P and event.peer is not None:
                ends = (run.rank, event.peer) if event.op == "send" else (event.peer, run.rank)
                side = sends if event.op == "send" else receives
                side[ends, event.tag, event.group].append((run.rank, k))
    return [pair for link in sends for pair in zip(sends[link], receives[link], strict=False)]
