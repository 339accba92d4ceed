"""The player of a learner's own run: what ``distlab trace`` has recorded, as a timeline.

For each rank a lane that computes and a lane that communicates; an arrow is a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..picture import Span
from ..picture.spans import WAIT, stack
from .scene import Choice, document
from .timeline import Arrow, Bar, Moment, Row, Timeline, scene_of_timeline
from .words import amount, duration, several

MOST_STEPS, MOST_ARROWS, MOST_LANES, MOST_TOLD = 100, 48, 3, 3
COMPUTE = {"forward", "backward", "weights", "optimizer"}
LOOKS = {"send": "send", "recv": "recv", WAIT: "wait"}
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "weights": "gradient of the weights",
    "optimizer": "optimizer",
    "compute": "other compute, and loading data",
    "send": "send",
    "recv": "receive",
    "collective": "other communication",
    "wait": "wait for another rank",
}


def own_document(spans: Sequence[Span], title: str) -> dict[str, Any]:
    """A player's file of one run; without spans it has one empty step."""
    ranks = sorted({span.rank for span in spans}) or [0]
    begin = min((span.start for span in spans), default=0.0)
    end = max((span.end for span in spans), default=1.0)
    rows = [_row(rank, [s for s in spans if s.rank == rank]) for rank in ranks]
    used = {_looks(span) for span in spans}
    made = Timeline(
        rows,
        _moments(spans, begin, end),
        begin,
        end,
        _arrows(spans, ranks),
        texts=[("time", "time"), ("sent", "sent by all")],
        legend=[(looks, words) for looks, words in LEGEND.items() if looks in used],
    )
    scene = scene_of_timeline(made)
    scene.ended = {"time": duration(end - begin), "sent": amount(_sent(spans, end))}
    about = "Your own run: above each rank's compute, below it what it sends and receives."
    return document(title, about, [Choice("run", ("yours",))], {("yours",): scene})


def _row(rank: int, mine: Sequence[Span]) -> Row:
    """Compute above; what communicates at the same time is in lanes of its own."""
    moves = [span for span in mine if span.lane == "communication"]
    placed = [(span, 0) for span in mine if span.lane != "communication"]
    placed += [(span, 1 + min(lane, MOST_LANES - 1)) for span, lane in stack(moves)]
    lanes: dict[int, list[Bar]] = defaultdict(list)
    for span, lane in placed:
        lanes[lane].append(Bar(span.start, span.end, _looks(span), span.label))
    return Row(f"rank {rank}", [lanes[lane] for lane in sorted(lanes)] or [[]])


def _looks(span: Span) -> str:
    if span.lane == "communication":
        return LOOKS.get(span.name, "collective")
    return span.name if span.name in COMPUTE else "compute"


def _arrows(spans: Sequence[Span], ranks: Sequence[int]) -> list[Arrow]:
    """From send to receive, unless there are too many to follow."""
    ends: dict[int, dict[str, Span]] = defaultdict(dict)
    for span in spans:
        if span.message is not None and span.name in LOOKS:
            ends[span.message][span.name] = span
    both = [(pair["send"], pair["recv"]) for pair in ends.values() if {*pair} >= {"send", "recv"}]
    if len(both) > MOST_ARROWS:
        return []
    row = {rank: number for number, rank in enumerate(ranks)}
    return [Arrow(row[a.rank], a.start, row[b.rank], b.end) for a, b in both]


def _sent(spans: Sequence[Span], until: float) -> int:
    """Bytes of the communications that were done by then, a message once."""
    moved = [s for s in spans if s.lane == "communication" and s.name not in (WAIT, "recv")]
    return sum(span.nbytes for span in moved if span.end <= until)


def _moments(spans: Sequence[Span], begin: float, end: float) -> list[Moment]:
    """A step whenever something ends; several in one step if there are too many."""
    start = "Start. " + ("Time runs to the right." if spans else "Nothing was recorded.")
    moments = [Moment(begin, start, {"time": "0 µs", "sent": "0 B"})]
    ordered = sorted(spans, key=lambda span: (span.end, span.rank))
    together = -(-len(ordered) // MOST_STEPS) or 1
    for first in range(0, len(ordered), together):
        group = ordered[first : first + together]
        now = group[-1].end
        told = [_told(span) for span in group[:MOST_TOLD]]
        if len(group) > MOST_TOLD:
            told.append(f"{several(len(group) - MOST_TOLD, 'other thing')} in the same time")
        texts = {"time": duration(now - begin), "sent": amount(_sent(spans, now))}
        moments.append(Moment(now, f"Until {duration(now - begin)}: {'; '.join(told)}.", texts))
    return moments


def _told(span: Span) -> str:
    """One span in words."""
    rank = f"rank {span.rank}"
    if span.name == WAIT:
        return f"{rank} has waited for rank {span.peer}"
    if span.lane != "communication":
        what = "its compute" if span.name == "other" else span.name
        return f"{rank} has done {what} {span.label}".rstrip()
    size = f" of {amount(span.nbytes)}" if span.nbytes else ""
    if span.name in ("send", "recv") and span.peer is not None:
        verb, word = ("sent", "to") if span.name == "send" else ("received", "from")
        return f"{rank} has {verb} {amount(span.nbytes)} {word} rank {span.peer}"
    return f"{rank} has done {span.name}{size}"
