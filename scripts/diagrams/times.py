"""Time to the right: lanes with bars, ladders of messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .letters import SMALL, width_of
from .shapes import LABEL, fitting
from .sheet import INNER, MARGIN, WIDTH, Sheet


@dataclass(frozen=True)
class Bar:
    """Something that lasts from ``start`` to ``end`` on a lane."""

    start: float
    end: float
    text: str = ""
    tone: str = "grey"
    strong: bool = False
    dashed: bool = False
    hatch: bool = False


@dataclass(frozen=True)
class Lanes:
    """Where lanes were drawn: x of a time, the middle of each lane, top and bottom of all.

    ``first``: the number of their first part on the sheet; what is inserted there lies behind them.
    """

    x: Callable[[float], float]
    middle: list[float]
    top: float
    bottom: float
    first: int


def lanes(
    sheet: Sheet,
    rows: Mapping[str, Sequence[Bar]],
    span: float,
    *,
    label: float = LABEL,
    right: float = 0,
    h: float = 26,
    apart: float = 8,
    base: bool = True,
) -> Lanes:
    """Bars over time, a lane for each name. ``right``: room for words behind the lanes."""
    left, width = MARGIN + label, INNER - label - right

    def x(time: float) -> float:
        return left + time / span * width

    top, middles, first = sheet.y, list[float](), len(sheet.parts)
    for name, bars in rows.items():
        middle = sheet.y + h / 2
        middles.append(middle)
        if name:
            sheet.text(MARGIN, middle, name, size=fitting(name, label - 4))
        if base:
            for start, end in gaps(bars, span):
                sheet.path([(x(start), middle), (x(end), middle)], "grey", dashed=True)
        for bar in bars:
            sheet.box(
                x(bar.start), sheet.y, x(bar.end) - x(bar.start), h, bar.text, bar.tone,
                strong=bar.strong, dashed=bar.dashed, hatch=bar.hatch,
            )  # fmt: skip
        sheet.y += h + apart
    return Lanes(x, middles, top, sheet.y - apart, first)


def gaps(bars: Sequence[Bar], span: float) -> list[tuple[float, float]]:
    """The times without a bar."""
    found, now = [], 0.0
    for bar in sorted(bars, key=lambda bar: bar.start):
        if bar.start > now + 1e-9:
            found.append((now, bar.start))
        now = max(now, bar.end)
    return [*found, (now, span)] if now < span - 1e-9 else found


def ticks(sheet: Sheet, where: Lanes, times: Mapping[float, str]) -> None:
    """Words below the lanes at some times, with a line behind the lanes."""
    for time, words in times.items():
        sheet.path([(where.x(time), where.top - 4), (where.x(time), sheet.y)], "grey", dashed=True)
        sheet.parts.insert(where.first, sheet.parts.pop())
        half = width_of(words, SMALL) / 2
        middle = min(max(where.x(time), MARGIN + half), WIDTH - MARGIN - half)
        sheet.text(middle, sheet.y + 10, words, anchor="middle", size=SMALL)
    sheet.y += 24


@dataclass(frozen=True)
class Message:
    """From rank to rank in a step; ``over``: 0 is the step's beginning, 1 its end."""

    step: float
    source: int
    target: int
    text: str = ""
    tone: str = "blue"
    lasts: float = 0.8


def ladder(
    sheet: Sheet,
    names: Sequence[str],
    messages: Sequence[Message],
    steps: float,
    *,
    label: float = LABEL,
    right: float = 0,
    apart: float = 36,
) -> Lanes:
    """Ranks as horizontal lines, time to the right, messages as slanted arrows."""
    left, width = MARGIN + label, INNER - label - right

    def x(step: float) -> float:
        return left + step / steps * width

    top, first = sheet.y, len(sheet.parts)
    middles = [top + 10 + apart * index for index in range(len(names))]
    for name, middle in zip(names, middles, strict=True):
        sheet.text(MARGIN, middle, name, size=fitting(name, label - 4))
        sheet.path([(left, middle), (left + width, middle)], "grey")
    for each in messages:
        start = (x(each.step), middles[each.source])
        end = (x(each.step + each.lasts), middles[each.target])
        sheet.arrow([start, end], each.tone)
        sheet.circle(*start, 2.5, each.tone)
        if each.text:
            plate(sheet, (start[0] + end[0]) / 2, (start[1] + end[1]) / 2, each.text, each.tone)
    sheet.y = middles[-1] + 16
    return Lanes(x, middles, top, sheet.y, first)


def plate(sheet: Sheet, x: float, y: float, text: str, tone: str) -> None:
    """A few letters on a small box, readable on lines."""
    width = width_of(text, SMALL) + 8
    sheet.box(x - width / 2, y - 9, width, 18, "", tone)
    sheet.text(x, y, text, anchor="middle", size=SMALL)
