"""The scene of a timeline: rows of bars that come into sight as time goes on, and what is below.

A row is a rank, with a lane or two. Below the rows there may be a panel: a quantity over time,
such as memory by kind. All share one axis of time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .scene import WIDTH, Scene, Shape, Step
from .words import UNITS

LANE, GAP, HEAD, AXIS = 22.0, 9.0, 8.0, 34.0  # heights: a lane, between rows, above, of the axis
LETTER, RIGHT = 7.8, 10.0  # the width of a letter; at the right
LINE, TITLE = 22.0, 32.0  # of text below, of a panel's title
GLYPH = {"": 7.4, " tiny": 5.8}  # width of a letter on a bar


@dataclass(frozen=True)
class Bar:
    """Something that goes on from ``start`` to ``end``."""

    start: float
    end: float
    looks: str
    label: str = ""


@dataclass
class Row:
    """A named row with its lanes.

    ``counter``: the name of a text at its right, of at most ``letters``; ``heading``: above it.
    """

    name: str
    lanes: list[list[Bar]]
    counter: str = ""
    letters: int = 0
    heading: str = ""


@dataclass(frozen=True)
class Arrow:
    """From a row at one time to a row at another."""

    row: int
    start: float
    to: int
    end: float


@dataclass
class Moment:
    """A step: up to which time the picture goes, what it says, and what texts change to."""

    time: float
    say: str
    texts: dict[str, str] = field(default_factory=dict)


@dataclass
class Panel:
    """A quantity over time: curves by looks, each a list of (time, value).

    ``stacked`` curves are areas above each other; else they are lines. ``top`` is the largest value
    of the axis, ``marks`` are values on it with their words.
    """

    title: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    top: float
    marks: Sequence[tuple[float, str]] = ()
    stacked: bool = False
    height: float = 110.0


@dataclass
class Timeline:
    """All that a timeline shows. ``texts``: named texts below, as (name, words before it)."""

    rows: list[Row]
    moments: list[Moment]
    begin: float
    end: float
    arrows: list[Arrow] = field(default_factory=list)
    panel: Panel | None = None
    texts: Sequence[tuple[str, str]] = ()
    legend: list[tuple[str, str]] = field(default_factory=list)


class _Layout:
    """Where times and rows are."""

    def __init__(self, made: Timeline) -> None:
        self.left = LETTER * max(len(row.name) for row in made.rows) + 9
        self.begin = made.begin
        self.right = WIDTH - RIGHT - LETTER * max(row.letters for row in made.rows)
        self.scale = (self.right - self.left) / max(made.end - made.begin, 1e-12)
        self.tops: list[float] = []
        y = HEAD
        for row in made.rows:
            y += LINE if row.heading else 0.0
            self.tops.append(y)
            y += len(row.lanes) * LANE + GAP
        self.bottom = y

    def x(self, time: float) -> float:
        """The place of a moment."""
        return self.left + (time - self.begin) * self.scale


def scene_of_timeline(made: Timeline) -> Scene:
    """The scene of a timeline; its first step is the moment before anything has happened."""
    layout = _Layout(made)
    panel = made.panel.height + TITLE + GAP if made.panel else 0.0
    foot = layout.bottom + panel + AXIS
    lines = math.ceil(len(made.texts) / 2)
    scene = Scene(foot + LINE * lines + 4)
    scene.clock = (HEAD - 4, foot - AXIS)
    _axis(scene, layout, made, foot - AXIS)
    for row, top in zip(made.rows, layout.tops, strict=True):
        _row(scene, layout, row, top)
    for arrow in made.arrows:
        _arrow(scene, layout, made.rows, arrow)
    if made.panel:
        _panel(scene, layout, made.panel, layout.bottom + TITLE, made.end)
    for number, (name, words) in enumerate(made.texts):
        y, left = foot + LINE * (number // 2) + 10, 2 + (number % 2) * WIDTH / 2
        scene.write(left, y, words, "soft")
        scene.write(left + WIDTH / 2 - 14, y, "–", "end", name)
    for moment in made.moments:
        reached = layout.x(moment.time)
        scene.steps.append(Step(moment.say, moment.texts, reached=reached))
    scene.legend = made.legend
    return scene


def _row(scene: Scene, layout: _Layout, row: Row, top: float) -> None:
    if row.heading:
        scene.write(2, top - 7, row.heading, "strong")
    height = len(row.lanes) * LANE
    scene.write(2, top + height / 2 + 5, row.name)
    scene.add(
        Shape("line", "grid", layout.left, top + height + GAP / 2, layout.right - layout.left)
    )
    if row.counter:
        scene.write(WIDTH - 4, top + height / 2 + 5, "", "end", row.counter)
    for number, lane in enumerate(row.lanes):
        y = top + number * LANE + 1
        for bar in joined(lane, 0.3 / layout.scale):
            x, width = layout.x(bar.start), (bar.end - bar.start) * layout.scale
            label, looks = "", bar.looks
            for size, glyph in GLYPH.items():
                if bar.label and len(bar.label) * glyph + 2 <= width:
                    label, looks = bar.label, bar.looks + size
                    break
            scene.timed.append(Shape("box", looks, x, y, max(width, 0.6), LANE - 2, label))


def joined(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """The bars in order; neighbours of one kind that nobody could tell apart become one."""
    out: list[Bar] = []
    for bar in sorted(bars, key=lambda each: (each.start, each.end)):
        last = out[-1] if out else None
        if (
            last is not None
            and not bar.label
            and (last.looks, last.label) == (bar.looks, "")
            and bar.start - last.end <= gap
        ):
            out[-1] = Bar(last.start, max(last.end, bar.end), bar.looks)
        else:
            out.append(bar)
    return out


def _arrow(scene: Scene, layout: _Layout, rows: Sequence[Row], arrow: Arrow) -> None:
    def middle(row: int) -> float:
        return layout.tops[row] + len(rows[row].lanes) * LANE - LANE / 2

    x, y = layout.x(arrow.start), middle(arrow.row)
    to_x, to_y = layout.x(arrow.end), middle(arrow.to)
    scene.timed.append(Shape("arrow", "soft", x, y, to_x - x, to_y - y))


def _axis(scene: Scene, layout: _Layout, made: Timeline, y: float) -> None:
    """Ticks of 1, 2 or 5 times a power of ten."""
    span = made.end - made.begin
    size, unit = next((u for u in UNITS if span >= u[0]), UNITS[-1])
    rough = span / size / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    for number in range(int(span / size / step) + 1):
        x = layout.x(made.begin + number * step * size)
        scene.add(Shape("line", "grid", x, HEAD, 0, y - HEAD))
        last = x + step * size * layout.scale > layout.right
        words = f"{number * step:g}" + (f" {unit}" if last else "")
        scene.write(x, y + 17, words, "small soft end" if x > layout.right - 20 else "small soft")


def _panel(scene: Scene, layout: _Layout, panel: Panel, top: float, end: float) -> None:
    bottom = top + panel.height
    scene.write(2, top - 13, panel.title, "strong")

    def y(value: float) -> float:
        return bottom - value / panel.top * panel.height

    for value, words in [(0.0, "0"), *panel.marks]:
        scene.add(Shape("line", "axis", layout.left, y(value), layout.right - layout.left))
        scene.write(layout.left - 5, y(value) + 4, words, "small soft end")
    curves = [*panel.curves.items()]
    for looks, curve in reversed(curves) if panel.stacked else curves:
        points = [(layout.x(time), y(value)) for time, value in curve]
        if panel.stacked:  # down to the axis: those below it are drawn over it
            scene.timed.append(Shape("area", looks, text=_stairs(points, bottom, layout.x(end))))
        else:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            scene.timed.append(Shape("area", f"curve {looks}", text=path))


def _stairs(points: Sequence[tuple[float, float]], bottom: float, right: float) -> str:
    """A path under a value that stays until it changes at once; the highest of each unit of x."""
    highest: dict[int, float] = {}
    for x, y in points:
        highest[round(x)] = min(y, highest.get(round(x), bottom))
        last = round(x), y
    highest[last[0]] = min(highest[last[0]], last[1])
    path, before = f"M{round(points[0][0])} {bottom:.1f}", bottom
    for x, y in highest.items():
        if abs(y - before) >= 0.1:
            path += f"H{x}V{y:.1f}"
            before = y
    return path + f"H{right:.0f}V{bottom:.1f}Z"
