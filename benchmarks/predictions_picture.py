"""The picture of ``docs/validation.md``: published against predicted, training and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from distlab.simulate.published import Row, recorded
from scripts.diagrams.plots import Axes, axes
from scripts.diagrams.sheet import Sheet

GOOD = 1.1  # the lines beside the diagonal
TOKENS, BUS = (200.0, 200_000.0), (3.0, 1000.0)
DECADES = {
    1: "1",
    10: "10",
    100: "100",
    1000: "1,000",
    10_000: "10,000",
    1e5: "100,000",
}
# by the beginning of the kind's GPU, or the place of a collective: tone and shape
MARKS = {
    "H100": ("blue", "circle"),
    "A100": ("orange", "square"),
    "B200 SXM 180 GB": ("green", "square"),
    "GB200 186 GB": ("green", "square"),
    "inside a node": ("green", "circle"),
    "between nodes": ("purple", "square"),
}
SHOWN = {"H100": "circles", "A100": "orange squares"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture."""
    sheet = Sheet("Published and predicted: on the diagonal both are the same")
    training = [row for row in rows if row.unit == "tokens/s/GPU"]
    collectives = [row for row in rows if row.unit == "GB/s"]
    gpus = Counter(row.kind.gpu.partition(" ")[0] for row in training)
    runs = [f"{gpus.pop(name)} on {name} ({mark})" for name, mark in SHOWN.items()]
    sheet.note(f"Training: runs {', '.join(runs)}, {gpus.total()} on {' and '.join(gpus)} (green)")
    _panel(sheet, training, TOKENS, "tokens/s per GPU")
    sheet.gap()
    sheet.note("Collectives: circles are inside a node, squares between nodes")
    _panel(sheet, collectives, BUS, "GB/s, bus bandwidth")
    said = (
        f"Two plots of predicted over published values. {len(training)} trainings lie near the "
        f"diagonal, from {TOKENS[0]:,.0f} to {TOKENS[1]:,.0f} tokens per second. "
        f"{len(collectives)} collectives lie near it, too."
    )
    path.write_text(sheet.svg(said, "validation"), encoding="utf-8")


def _panel(sheet: Sheet, rows: Sequence[Row], limits: tuple[float, float], unit: str) -> None:
    plot = axes(sheet, limits, limits, height=250, left=70, log_x=True, log_y=True)
    low, high = limits
    plot.line([(low, low), (high, high)], "plain", k=False)
    plot.line([(low * GOOD, low), (high, high / GOOD)], "grey", dashed=True, k=False)
    plot.line([(low, low * GOOD), (high / GOOD, high)], "grey", dashed=True, k=False)
    for row in rows:
        _mark(plot, row)
    ticks = {value: words for value, words in DECADES.items() if low <= value <= high}
    plot.frame(ticks, ticks, f"published, {unit}; dashed: 10 % off", f"predicted, {unit}")


def _mark(plot: Axes, row: Row) -> None:
    kind = row.kind
    tone, shape = MARKS[kind.way if row.is_collective else kind.gpu]
    x, y = plot.at(row.value, recorded()[row.id]["predicted"])
    if shape == "circle":
        plot.sheet.circle(x, y, 3.5, tone)
    else:
        corners = [(x - 3, y - 3), (x + 3, y - 3), (x + 3, y + 3), (x - 3, y + 3), (x - 3, y - 3)]
        plot.sheet.path(corners, tone)
