"""What the ranks did over time: spans, a picture of them, and a trace for Perfetto.

A ``Span`` is one thing one rank did from ``start`` to ``end``. Compute comes from the ledger's
tensor operators, communication from its events. A communication is split where its data could move
at the earliest. A receive can't move data before its send was issued, an all-reduce not before the
last rank has come, a broadcast not before its root has come. The time before that moment is a
"wait", and it names the rank that was waited for. So a picture tells three things apart: a rank
computes, it communicates, or it waits for a slower one.

    ready(receive)             = start of the matching send
    ready(broadcast, scatter)  = start on the root
    ready(reduce, gather)      = on the root, the latest start of all; elsewhere its own start
    ready(other collectives)   = the latest start over the ranks of the group

The format of the trace is Chrome's Trace Event Format; ui.perfetto.dev opens it.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from ..observe.gpu_clock import GPU
from ..observe.log import P2P, Event, Log, readable
from ..ranks.results import RankResults

Lane = Literal["compute", "communication", "data"]

WAIT = "wait"
JOIN = 2e-4  # Python between two operators of one phase takes less than this: one span
SHORTEST_WAIT = 2e-5  # ranks are never at the same point to the microsecond
ROOT_GIVES = ("broadcast", "scatter")
ROOT_TAKES = ("reduce", "gather")


@dataclass(frozen=True)
class Span:
    """One thing that ``rank`` did, in seconds on a clock that all ranks share.

    ``peer`` is the other rank of a message, the root of a collective, or the rank waited for.
    ``message`` is the same number at both ends of a message. ``line`` is the learner's line,
    ``label`` the one given to ``RankContext.span``. ``clock`` names the clock of the times. On a
    rank with a GPU, times of the ``"host"`` say when calls were made, not when the GPU worked.
    """

    rank: int
    lane: Lane
    name: str
    start: float
    end: float
    detail: str = ""
    nbytes: int = 0
    peer: int | None = None
    line: str = ""
    region: str = ""
    message: int | None = None
    label: str = ""
    clock: str = "host"

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def spans_of(run: RankResults | Sequence[Log]) -> list[Span]:
    """The compute and communication of a run or of its logs, ordered by rank and time.

    Without what a rank did before its ``RankContext.start_picture``.
    """
    logs: Sequence[Log] = getattr(run, "logs", run)
    ready, messages = _ready(logs), _messages(logs)
    moments = [span[2] for log in logs for span in log.spans]
    moments += [t for log in logs for e in log.events for t in (e.start, e.end) if t is not None]
    horizon = max(moments, default=0.0)
    spans: list[Span] = []
    for log in logs:
        mine = _computed(log)
        for event in log.events:
            key = (log.rank, event.index)
            until, whom = ready.get(key, (event.start, None))
            mine += _communicated(log.rank, event, until, whom, messages.get(key), horizon)
        spans += [span for span in mine if span.start >= log.picture_from]
    return sorted(spans, key=lambda s: (s.rank, s.start, s.end))


def _computed(log: Log) -> list[Span]:
    """Compute of one rank: neighbours of one name become one span, unless it communicates there."""
    begins = sorted(event.start for event in log.events)
    spans: list[Span] = []
    every = ((span, GPU if i in log.on_gpu else "host") for i, span in enumerate(log.spans))
    for (full, start, end), clock in sorted(every, key=lambda pair: pair[0][1]):
        name, _, label = full.partition(" ")
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.name == name
            and last.label == label == ""
            and last.clock == clock
            and start - last.end < JOIN
            and bisect.bisect(begins, last.end) == bisect.bisect(begins, start)
        ):
            spans[-1] = replace(last, end=max(end, last.end))
        else:
            lane: Lane = "data" if name == "data" else "compute"
            spans.append(Span(log.rank, lane, name, start, end, label=label, clock=clock))
    return spans


def _communicated(
    rank: int, event: Event, ready: float, whom: int | None, message: int | None, horizon: float
) -> list[Span]:
    """One event as a wait (if another rank was late) and the operator itself."""
    end = horizon if event.end is None else event.end
    begin = event.start if ready - event.start < SHORTEST_WAIT else min(ready, end)
    more: dict[str, Any] = {"line": event.line, "region": event.region, "clock": event.clock}
    spans = []
    if begin > event.start:
        detail = f"{event.op}: waits for rank {whom}"
        spans.append(
            Span(rank, "communication", WAIT, event.start, begin, detail, peer=whom, **more)
        )
    detail = str(event) + ("; never waited for" if event.end is None else "")
    nbytes = max(event.sent, event.received)
    if nbytes:
        detail += f", {readable(nbytes)}"
    more |= {"nbytes": nbytes, "peer": event.peer, "message": message}
    return [*spans, Span(rank, "communication", event.op, begin, end, detail, **more)]


Key = tuple[int, int]  # rank, index of the event on it


def _ready(logs: Sequence[Log]) -> dict[Key, tuple[float, int | None]]:
    """For each event that depends on another rank: when that rank was there, and which it was."""
    ready: dict[Key, tuple[float, int | None]] = {}
    together: dict[Any, list[tuple[int, Event]]] = defaultdict(list)
    issued: Counter[Any] = Counter()
    for log in logs:
        for event in log.events:
            if event.op not in P2P:
                key = (log.rank, event.group)
                together[event.group, issued[key]].append((log.rank, event))
                issued[key] += 1
    for members in together.values():
        latest, last = max((event.start, rank) for rank, event in members)
        began = {rank: event.start for rank, event in members}
        for rank, event in members:
            root = event.peer
            if event.op in ROOT_GIVES and root is not None:
                ready[rank, event.index] = began.get(root, event.start), root
            elif event.op not in ROOT_TAKES or rank == root:
                ready[rank, event.index] = latest, last
    for (sender, send), (receiver, receive) in _pairs(logs):
        ready[receiver, receive.index] = send.start, sender
    return ready


def _pairs(logs: Sequence[Log]) -> list[tuple[tuple[int, Event], tuple[int, Event]]]:
    """Each send with its receive: the k-th of one rank to another with the same tag."""
    sends: dict[Any, list[tuple[int, Event]]] = defaultdict(list)
    receives: dict[Any, list[tuple[int, Event]]] = defaultdict(list)
    for log in logs:
        for event in log.events:
            if event.op == "send":
                sends[log.rank, event.peer, event.tag].append((log.rank, event))
            elif event.op == "recv" and event.peer is not None:
                receives[event.peer, log.rank, event.tag].append((log.rank, event))
    return [pair for link in sends for pair in zip(sends[link], receives[link], strict=False)]


def _messages(logs: Sequence[Log]) -> dict[Key, int]:
    """A number for each message, at both of its ends."""
    numbers: dict[Key, int] = {}
    for number, pair in enumerate(_pairs(logs)):
        for rank, event in pair:
            numbers[rank, event.index] = number
    return numbers


def stack(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Each span with a row, so that no two in one row overlap; few rows, by time of start.

    A span that begins at the moment when another ends follows it in the same row: a wait and what
    it waited for stay together.
    """
    placed: list[tuple[Span, int]] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = [row for row, end in enumerate(ends) if end <= span.start]
        row = next((r for r in free if ends[r] == span.start), free[0] if free else len(ends))
        ends[row:] = [span.end, *ends[row + 1 :]]
        placed.append((span, row))
    return placed


def time_label(spans: Iterable[Span]) -> str:
    """What the axis of time shows: milliseconds, and whose, if a GPU's are among them."""
    clocks: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        clocks[span.clock].add(span.name)
    if GPU not in clocks:
        return "milliseconds"
    by_host = ", ".join(sorted(clocks["host"]))
    return "milliseconds by CUDA events" + (f"; host time: {by_host}" if by_host else "")


def covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of ``spans`` goes on."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


SHARES = ("computes", "only communicates", "only waits", "idle")


def shares(spans: Sequence[Span]) -> dict[int, dict[str, int]]:
    """For each rank the percent of the time of all that it spent on each of ``SHARES``.

    Time is counted once: communication beside compute is compute. Idle is when a rank neither
    computed nor communicated nor waited for another rank: Python between operators, or a busy
    processor. The percents are whole numbers and add up to 100: what rounding down leaves goes to
    those that lost most.
    """
    total = max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)
    found = {}
    for rank in sorted({s.rank for s in spans}):
        mine = [s for s in spans if s.rank == rank]
        computes = [s for s in mine if s.lane != "communication"]
        moves = [s for s in mine if s.name != WAIT]
        reached = [covered(computes), covered(moves), covered(mine), total]
        parts = [100 * (b - a) / total if total else 0 for a, b in pairwise([0.0, *reached])]
        whole = [math.floor(part) for part in parts]
        lost = sorted(range(len(parts)), key=lambda k: whole[k] - parts[k])
        for k in lost[: 100 - sum(whole)]:
            whole[k] += 1
        found[rank] = dict(zip(SHARES, whole, strict=True))
    return found


def overlapping(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans in groups: what overlaps, directly or through others, is in one group."""
    group: list[Span] = []
    reached = 0.0
    for span in sorted(spans, key=lambda s: s.start):
        if group and span.start >= reached:
            yield group
            group = []
        reached = max(reached, span.end) if group else span.end
        group.append(span)
    if group:
        yield group


def idle_share(spans: Sequence[Span]) -> float:
    """The share of time in which ranks are idle, from the first begin to the last end of all."""
    ranks = {span.rank for span in spans}
    whole = max(s.end for s in spans) - min(s.start for s in spans)
    busy = sum(covered(s for s in spans if s.rank == rank) for rank in ranks)
    return 1 - busy / (len(ranks) * whole)
