"""Unions and differences of intervals, against sets of whole numbers."""

from __future__ import annotations

import random

from given.intervals import Interval, length, union, without


def runs(moments: set[int]) -> list[Interval]:
    """The moments as intervals that do not touch."""
    begins = [m for m in sorted(moments) if m - 1 not in moments]
    ends = [m + 1 for m in sorted(moments) if m + 1 not in moments]
    return list(zip(begins, ends, strict=True))


def some(draw: random.Random) -> list[Interval]:
    """Up to six intervals; one may end before it begins."""
    return [
        (low, low + draw.randint(-1, 6)) for low in draw.choices(range(25), k=draw.randint(0, 6))
    ]


def test_unions_and_differences() -> None:
    draw = random.Random(4)
    for _ in range(400):
        a, b = some(draw), some(draw)
        in_a, in_b = ({m for i in part for m in range(*i)} for part in (a, b))
        assert union(iter(a)) == runs(in_a), a
        assert without(iter(a), iter(b)) == runs(in_a - in_b), (a, b)
        assert length(union(a)) == len(in_a)
