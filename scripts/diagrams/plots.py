"""Curves between axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .letters import SMALL
from .sheet import MARGIN, WIDTH, Point, Sheet


@dataclass(frozen=True)
class Axes:
    """A plot's area on the sheet; scales may be logarithmic."""

    sheet: Sheet
    x: tuple[float, float]
    y: tuple[float, float]
    xs: tuple[float, float]
    ys: tuple[float, float]
    log_x: bool = False
    log_y: bool = False

    def at(self, x: float, y: float) -> Point:
        def share(value: float, limits: tuple[float, float], log: bool) -> float:
            low, high = map(math.log, limits) if log else limits
            return ((math.log(value) if log else value) - low) / (high - low)

        right = self.x[0] + share(x, self.xs, self.log_x) * (self.x[1] - self.x[0])
        return right, self.y[1] - share(y, self.ys, self.log_y) * (self.y[1] - self.y[0])

    def frame(
        self, x: Mapping[float, str], y: Mapping[float, str], x_name: str, y_name: str
    ) -> None:
        """Axes with words at some values, and their names; takes room on the sheet."""
        self.sheet.path([(self.x[0], self.y[0]), (self.x[0], self.y[1]), (self.x[1], self.y[1])])
        self.sheet.text(self.x[0], self.y[0] - 14, y_name, size=SMALL)
        for value, words in x.items():
            px, py = self.at(value, self.ys[0])
            self.sheet.path([(px, py), (px, py + 4)])
            self.sheet.text(px, py + 14, words, anchor="middle", size=SMALL)
        for value, words in y.items():
            px, py = self.at(self.xs[0], value)
            self.sheet.path([(px - 4, py), (px, py)])
            self.sheet.text(px - 7, py, words, anchor="end", size=SMALL)
        self.sheet.text(self.x[1], self.y[1] + 32, x_name, anchor="end", size=SMALL)
        self.sheet.y = self.y[1] + 44

    def line(
        self, points: Sequence[Point], tone: str, *, dashed: bool = False, k: bool = True
    ) -> None:
        """A curve through points."""
        self.sheet.path([self.at(x, y) for x, y in points], tone, dashed=dashed, k=k)

    def word(
        self, x: float, y: float, text: str, tone: str, *, anchor: str = "start", up: float = 0
    ) -> None:
        """A word beside a curve."""
        px, py = self.at(x, y)
        px += {"start": 6, "middle": 0, "end": -6}[anchor]
        self.sheet.text(px, py - up, text, tone=tone, anchor=anchor, size=SMALL)


def axes(
    sheet: Sheet,
    xs: tuple[float, float],
    ys: tuple[float, float],
    *,
    height: float = 150,
    left: float = 56,
    right: float = 16,
    log_x: bool = False,
    log_y: bool = False,
) -> Axes:
    """Axes below what was drawn; ``left``: room for the words at the vertical one."""
    top = sheet.y + 26
    return Axes(
        sheet, (MARGIN + left, WIDTH - MARGIN - right), (top, top + height), xs, ys, log_x, log_y
    )
