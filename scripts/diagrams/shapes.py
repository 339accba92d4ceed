"""What diagrams are made of: rows of cells, columns with arrows, flows and circuits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .letters import SIZE, SMALL, width_of
from .sheet import INNER, MARGIN, WIDTH, Point, Sheet

LABEL = 74  # width of the words before a row


@dataclass(frozen=True)
class Cell:
    """A cell of a row; ``wide``: in units of the row's cells."""

    text: str = ""
    tone: str = "grey"
    strong: bool = False
    dashed: bool = False
    hatch: bool = False
    wide: float = 1
    bold: bool = False


def row(
    sheet: Sheet,
    label: str,
    cells: Sequence[Cell | None],
    *,
    x: float = MARGIN + LABEL,
    w: float = 34,
    h: float = 28,
    gap: float = 3,
    after: str = "",
    below: float = 5,
) -> float:
    """Cells side by side, None leaves one out; gives back where they end."""
    middle = sheet.y + h / 2
    if label:
        sheet.text(MARGIN, middle, label, size=fitting(label, x - MARGIN - 4))
    for cell in cells:
        wide = cell.wide if cell else 1
        if cell:
            sheet.box(
                x, sheet.y, wide * w - gap, h, cell.text, cell.tone,
                strong=cell.strong, dashed=cell.dashed, hatch=cell.hatch, bold=cell.bold,
            )  # fmt: skip
        x += wide * w
    if after:
        sheet.text(x + 6, middle, after, size=fitting(after, WIDTH - MARGIN - x - 4))
    sheet.y += h + below
    return x


def fitting(text: str, width: float) -> int:
    """The size of letters at which the text is at most ``width`` wide; ValueError if none is."""
    for size in (SIZE, SMALL):
        if width_of(text, size) <= width:
            return size
    raise ValueError(f"{text!r} needs {width_of(text, SMALL):.0f} of {width:.0f}")


def columns(
    sheet: Sheet,
    names: Sequence[str],
    heads: Sequence[str],
    cells: Sequence[Sequence[Cell | None]],
    arrows: Sequence[tuple[int, int, int]] = (),
    *,
    label: float = LABEL,
    apart: float = 60,
    h: float = 32,
    below: float = 10,
) -> list[list[Point]]:
    """What each of ``names`` has, a column per moment; an arrow is (column, from row, to row).

    It goes to the next column. Gives back the middles, by column and row.
    """
    left = MARGIN + label
    w = (WIDTH - MARGIN - left - apart * (len(cells) - 1)) / len(cells)
    if any(heads):
        for index, head in enumerate(heads):
            middle = left + index * (w + apart) + w / 2
            sheet.text(middle, sheet.y + 8, head, anchor="middle", size=fitting(head, w + apart))
        sheet.y += 24
    top = sheet.y
    for index, name in enumerate(names):
        middle = top + index * (h + below) + h / 2
        sheet.text(MARGIN, middle, name, size=fitting(name, label - 4))
    found: list[list[Point]] = []
    for index, column in enumerate(cells):
        x = left + index * (w + apart)
        found.append([])
        for line, cell in enumerate(column):
            y = top + line * (h + below)
            found[-1].append((x + w / 2, y + h / 2))
            if cell:
                sheet.box(
                    x, y, w, h, cell.text, cell.tone,
                    strong=cell.strong, dashed=cell.dashed, hatch=cell.hatch, bold=cell.bold,
                )  # fmt: skip
    for index, source, target in arrows:
        (x, y), (to, height) = found[index][source], found[index + 1][target]
        sheet.arrow([(x + w / 2 + 2, y), (to - w / 2 - 2, height)])
    sheet.y = top + len(names) * (h + below)
    return found


def circuit(
    sheet: Sheet,
    names: tuple[str, str],
    upper: Sequence[str],
    lower: Sequence[str],
    down: str,
    up: str,
    *,
    tones: tuple[str, str] = ("blue", "orange"),
    h: float = 44,
) -> None:
    """Two rows of boxes, the lower one from left to right, the upper one back."""
    sheet.note(names[0], bold=True)
    flow(sheet, [Cell(words, tones[0]) for words in upper], h=h, apart=26, back=True)
    start = sheet.y - 6
    sheet.gap(34)
    top = sheet.y
    flow(sheet, [Cell(words, tones[1]) for words in lower], h=h, apart=26)
    sheet.note(names[1], bold=True)
    half = min((INNER - 26 * (len(boxes) - 1)) / len(boxes) for boxes in (upper, lower)) / 2
    left, right = MARGIN + half, WIDTH - MARGIN - half
    sheet.arrow([(left, start), (left, top - 2)], k=True)
    sheet.arrow([(right, top - 2), (right, start)], k=True)
    middle = (start + top) / 2
    sheet.text(left + 10, middle, down)
    sheet.text(right - 10, middle, up, anchor="end")


def flow(
    sheet: Sheet,
    boxes: Sequence[Cell],
    *,
    x: float = MARGIN,
    width: float = INNER,
    h: float = 44,
    apart: float = 20,
    back: bool = False,
) -> list[Point]:
    """Boxes in a row with arrows between, ``back``: to the left; gives back their middles."""
    unit = (width - apart * (len(boxes) - 1)) / sum(box.wide for box in boxes)
    middles: list[Point] = []
    edges: list[tuple[float, float]] = []
    for box in boxes:
        w = box.wide * unit
        sheet.box(
            x, sheet.y, w, h, box.text, box.tone,
            strong=box.strong, dashed=box.dashed, hatch=box.hatch, bold=box.bold,
        )  # fmt: skip
        middles.append((x + w / 2, sheet.y + h / 2))
        edges.append((x, x + w))
        x += w + apart
    for (_, end), (start, _) in pairwise(edges):
        ends = [(end + 2, sheet.y + h / 2), (start - 2, sheet.y + h / 2)]
        sheet.arrow(ends[::-1] if back else ends)
    sheet.y += h + 8
    return middles
