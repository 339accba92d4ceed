"""Diagrams of phase 4: ranks that hang, restarts and preemption."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .letters import SMALL, width_of
from .plots import axes
from .registry import diagram
from .shapes import Cell, flow
from .sheet import INNER, MARGIN, Sheet
from .times import Bar, lanes


def sequence(sheet: Sheet, names: Sequence[str], messages: Sequence[tuple[int, int, str]]) -> None:
    """Time goes down; an arrow from one line to another, with its words above."""
    step, w = 38.0, 110.0
    apart = (INNER - w) / (len(names) - 1)
    xs = [MARGIN + w / 2 + index * apart for index in range(len(names))]
    for x, name in zip(xs, names, strict=True):
        sheet.box(x - w / 2, sheet.y, w, 28, name, "grey", bold=True)
    top = sheet.y + 28
    bottom = top + 12 + step * len(messages)
    for x in xs:
        sheet.path([(x, top), (x, bottom)], "grey", dashed=True)
    for number, (source, target, words) in enumerate(messages):
        y = top + 32 + number * step
        way = 1 if target > source else -1
        sheet.arrow(
            [(xs[source] + 3 * way, y), (xs[target] - 3 * way, y)],
            "blue" if way > 0 else "orange",
            k=True,
        )
        middle = (xs[source] + xs[target]) / 2
        assert width_of(words, SMALL) < apart - 10, words
        sheet.text(middle, y - 13, words, anchor="middle", size=SMALL)
    sheet.y = bottom + 6


@diagram("4.5", "The rank that passed the fewest points is to blame")
def watchdog(sheet: Sheet) -> None:
    points, end = [15, 14, 15], 9.0
    rows = {}
    for rank, point in enumerate(points):
        if point < max(points):
            bars = [Bar(0, 1.9, "forward", "blue"), Bar(1.9, end, "sleeps", "red", strong=True)]
        else:
            bars = [
                Bar(0, 1.9, "forward", "blue"),
                Bar(1.9, 4.3, "backward", "blue"),
                Bar(4.3, end, "waits in all-reduce", "grey", dashed=True),
            ]
        rows[f"rank {rank}"] = bars
    where = lanes(sheet, rows, end, right=76)
    for point, middle in zip(points, where.middle, strict=True):
        sheet.text(where.x(end) + 10, middle, f"point {point}", bold=point < max(points))
    sheet.gap(4)
    sheet.note(
        "A thread publishes each rank's count, which the main thread moves on. All are silent, "
        "so silence alone blames nobody."
    )
    words = [
        "time-out",
        "all write\nstacks, one\nthe report",
        "all end",
        "the agent\nstarts all\nagain",
    ]
    flow(sheet, [Cell(word, "orange" if not k else "grey") for k, word in enumerate(words)], h=62)


@diagram("4.13", "A rank that repeats a fresh name is alive")
def joining(sheet: Sheet) -> None:
    messages = [
        (0, 1, "hello/1 = b7"),
        (2, 1, "hello/0 = a3"),
        (2, 1, "call = [a3, b7]"),
        (1, 0, "its own b7: alive"),
        (0, 1, "answer/1 = a3"),
        (1, 2, "all answers are a3"),
        (2, 1, "complete/a3"),
        (1, 0, "go on under a3"),
    ]
    sequence(sheet, ["rank 1", "store", "rank 0"], messages)
    sheet.note(
        "a3 and b7 are random names, new in each attempt. Rank 0 says hello as well, and repeats "
        "the call until all have answered. Keys of the last attempt hold other names, so nobody "
        "follows them."
    )


@diagram("4.14", "Leaving is agreed on; then all save the same step")
def preemption(sheet: Sheet) -> None:
    rows = {}
    for rank in range(2):
        rows[f"rank {rank}"] = [
            Bar(0, 1.5, "step 5", "blue"),
            Bar(1.5, 3, "step 6", "blue"),
            Bar(4.3, 5.8, "save 6", "green"),
            Bar(5.8, 7, "leave", "grey"),
            Bar(7.7, 9, "step 7", "blue", dashed=True),
        ]
    where = lanes(sheet, rows, 9, h=30, apart=24)
    x1, x2 = where.x(3.1), where.x(4.2)
    sheet.box(
        x1,
        where.top - 2,
        x2 - x1,
        where.bottom - where.top + 4,
        "agree:\nyes",
        "orange",
        strong=True,
    )
    x = where.x(2.0)
    sheet.arrow([(x, where.middle[1] + 34), (x, where.middle[1] + 17)], "red", k=True)
    sheet.text(x + 8, sheet.y + 6, "SIGTERM", tone="red", bold=True)
    sheet.text(where.x(9), sheet.y + 6, "next attempt", anchor="end")
    sheet.gap(26)
    save, fail = 20.0, 86400.0
    best = math.sqrt(2 * save * fail)
    plot = axes(sheet, (300, 7200), (0, 8), height=120, left=50)
    minutes = (10, 30, 60, 90, 120)
    plot.frame(
        {60.0 * m: f"{m} min" for m in minutes},
        {n: f"{n} %" for n in (0, 4, 8)},
        "between two saves",
        "time lost",
    )
    times = [300 + 60 * k for k in range(116)]
    plot.line([(t, 100 * (save / t + t / 2 / fail)) for t in times], "blue")
    lost = 100 * (save / best + best / 2 / fail)
    sheet.circle(*plot.at(best, lost), 5, "green")
    plot.word(best, lost, f"√(2·s·F) = {best:,.0f} s", "green", up=22)
    sheet.note(
        f"A save of s = {save:g} s, a failure every F = {fail:,.0f} s: lost is s/T for saving and "
        "T/2F for steps done again."
    )
