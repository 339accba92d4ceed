"""What is true of a profile, found moment by moment and not by intervals."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from given.profile_files import Change, Span, Trace

PAUSED = ((0, 10), (20, 30), (45, 50))
KINDS = ("compute", "communication", "copy", "data", "optimizer")


def window_of(spans: Sequence[Span]) -> tuple[int, int]:
    """First begin and last end of a step."""
    steps = [s for s in spans if s.kind == "step"]
    return min(s.begin for s in steps), max(s.end for s in steps)


def true_parts(spans: Sequence[Span]) -> dict[str, int]:
    """ns of each part: the moments at which something changes cut the window into pieces."""
    low, high = window_of(spans)
    edges = sorted(
        [(low, "", 0), (high, "", 0)]
        + [(max(s.begin, low), s.kind, 1) for s in spans if s.end > low]
        + [(s.end, s.kind, -1) for s in spans if s.end > low]
    )
    running: Counter[str] = Counter()
    found = dict.fromkeys((*KINDS, "launch"), 0)
    for (at, kind, more), (later, _, _) in pairwise(edges):
        running[kind] += more
        if low <= at < high:
            part = next((k for k in KINDS if running[k] > 0), "launch")
            found[part] += min(later, high) - at
    return found


def true_gaps(spans: Sequence[Span]) -> dict[tuple, int]:
    """ns of each lane in which it waited for a launch."""
    found: dict[tuple, int] = {}
    work = [s for s in spans if s.kind in ("compute", "communication", "copy")]
    for span in work:
        # ties in begin: a gap belongs to the time, so equal begins share one
        before = [s.end for s in work if s.lane == span.lane and s.begin < span.begin]
        late = min(span.launched, span.begin) - max(before) if before else 0
        found[span.lane] = found.get(span.lane, 0) + max(0, late)
    return found


def true_growth(spans: Sequence[Span], changes: Sequence[Change]) -> list[int]:
    """Bytes in use at the ends of the steps, one less the other."""
    ends = sorted(s.end for s in spans if s.kind == "step")
    held = [sum(c.size for c in changes if c.at <= end) for end in ends]
    return [b - a for a, b in pairwise(held)]


def true_kept(spans: Sequence[Span], changes: Sequence[Change]) -> dict[str, int]:
    """Bytes by site: of each allocation, whether its address is given back before the last end."""
    ends = sorted(s.end for s in spans if s.kind == "step")
    inside = [c for c in changes if c.at <= ends[-1]]
    found: Counter[str] = Counter()
    for k, change in enumerate(inside):
        gone = any(c.address == change.address for c in inside[k + 1 :])
        if change.size > 0 and change.at > ends[0] and not gone:
            found[change.site] += change.size
    return dict(found)


def with_pauses() -> Trace:
    """Steps with time between them, in which work runs, and memory is taken and given back."""
    found = [Span("step", f"s{k}", (1, 1), a, b, a) for k, (a, b) in enumerate(PAUSED)]
    found += [
        Span("compute", "k", (0, 7), 5, 15, 5),
        Span("copy", "m", (0, 20), 12, 18, 11),
        Span("data", "d", (1, 1), 31, 35, 31),
        Span("communication", "gloo:op_a", (0, 20), 36, 44, 34),
        Span("compute", "k", (0, 7), 47, 49, 46),
    ]
    changes = (
        Change(8, 5, 8, "a.py:3"), Change(12, 6, 16, "a.py:3"), Change(15, -5, 8),
        Change(25, 2, 24, "b.py:9"), Change(33, 4, 32, "b.py:9"), Change(35, -2, 24),
        Change(48, 3, 8, "a.py:3"),
    )  # fmt: skip
    return Trace(tuple(found), changes)


def small_traces(seed: int, count: int = 60) -> dict[str, Trace]:
    """Traces by their names; the first shows at every seed what few of the others do."""
    drawn = {f"trace {k}": small_trace(random.Random(f"{seed} {k}")) for k in range(count)}
    return {"a trace with time between its steps": with_pauses(), **drawn}


def small_trace(draw: random.Random, spans: int = 14) -> Trace:
    """Spans and changes within 40 ns: they touch, lie in each other, and begin together."""
    ends = sorted(draw.sample(range(5, 36), 4))
    begins = [draw.randint(0, 4), *ends[:-1]]
    steps = zip(begins, ends, strict=True)
    found = [Span("step", f"s{k}", (1, 1), a, b, a) for k, (a, b) in enumerate(steps)]
    taken = set()
    for _ in range(spans):
        kind = draw.choice(KINDS)
        begin, lane = draw.randint(0, 40), (0, draw.choice((7, 20)))
        if (begin, lane) in taken:  # which of two that begin together is the first is not said
            continue
        taken.add((begin, lane))
        end, name = begin + draw.randint(1, 9), f"gloo:op_{draw.choice('ab')}"
        found.append(Span(kind, name, lane, begin, end, begin - draw.randint(0, 6)))
    draw.shuffle(found)
    changes, free, owned = [], [8, 16, 24, 32], {}
    for at in sorted(draw.choices(range(41), k=16)):
        if owned and (draw.random() < 0.4 or not free):
            address = draw.choice(sorted(owned))
            changes.append(Change(at, -owned.pop(address), address))
            free.append(address)
        else:
            address = free.pop(draw.randrange(len(free)))
            owned[address] = draw.choice((0, 1, 2, 2, 5))
            changes.append(Change(at, owned[address], address, draw.choice(("a.py:3", "b.py:9"))))
    return Trace(tuple(found), tuple(changes))
