"""Moments as half-open intervals [begin, end): those of any interval, and those of none of others.

Cost: O(n·log n) for n intervals.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments of all intervals, as few intervals in their order; touching ones become one.

    An interval that does not end after its begin has no moment.
    """
    found: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return found


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The moments of ``intervals`` that are in none of ``others``, as ``union`` gives them."""
    found, cuts, at = [], union(others), 0
    for begin, end in union(intervals):
        while at < len(cuts) and cuts[at][1] <= begin:
            at += 1
        for low, high in cuts[at:]:
            if low >= end:
                break
            found.append((begin, low))
            begin = high
        found.append((begin, end))
    return union(found)


def length(intervals: Iterable[Interval]) -> int:
    """The length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)
