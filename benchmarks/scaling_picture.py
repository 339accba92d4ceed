"""The picture of a model's recorded cells: a column for each family of strategies.

A row of panels for the throughput on each cluster, and one for the memory, which is the same on
all clusters. ``REFERENCE`` is drawn in grey in every panel, so that families can be compared, and
around it what the error of its prediction leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distlab.hardware.clusters import load_cluster

from .scaling_choice import Cells
from .scaling_words import (
    DDP,
    FREE,
    FSDP,
    HYBRID,
    LOCAL,
    OWN,
    PLAIN,
    SERVER,
    SERVERS,
    ZERO1,
    ZERO2,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REFERENCE = DDP
FAMILIES = {
    "replicas": (PLAIN, REFERENCE, LOCAL),
    "sharded": (ZERO1, ZERO2, FSDP, HYBRID),
    "DDP with an all-reduce of our own": OWN,
    "parameter servers": (SERVER, SERVERS, FREE),
}
# Okabe & Ito 2008: colour-blind readers tell them apart; in print markers and lines do
STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#000000", "D", ":"),
)
GREY: dict[str, Any] = {"color": "#B0B0B0", "lw": 4, "solid_capstyle": "round", "zorder": 1}
GIGABYTES = (1, 2, 2.8, 2.9, 3, 3.1, 3.5, 4, 5, 6, 8, 10, 15, 20, 30, 40, 60, 80, 120, 160, 240)


def draw(
    cells: Cells,
    counts: tuple[int, ...],
    path: Path,
    title: str,
    errors: Mapping[str, float | None],
) -> None:
    """Throughput per GPU and memory per GPU over the number of GPUs.

    ``errors``: of the reference on each cluster, None where it is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    clusters = list(dict.fromkeys(cluster for cluster, _, _ in cells))
    rows = 1 + len(clusters)
    figure, grid = plt.subplots(
        rows, len(FAMILIES), figsize=(13, 1.6 + 2.5 * rows), layout="constrained", sharey="row",
        sharex=True, squeeze=False,
    )  # fmt: skip
    known = any(error is not None for error in errors.values())
    grey = f"grey: {REFERENCE}" + (", and the error of its prediction" if known else "")
    figure.suptitle(f"{title} ({grey})", weight="bold")
    unit = next(iter(cells.values()))["unit"]
    measures = [(c, f"{c}:\n{unit} per second and GPU", _rate) for c in clusters]
    measures.append((clusters[0], "GB of memory per GPU", _gigabytes))
    for line, (cluster, label, value) in zip(grid, measures, strict=True):
        for axes, names in zip(line, FAMILIES.values(), strict=True):
            _panel(axes, names, cells, cluster, value)
            if value is _rate and (error := errors[cluster]) is not None:
                _band(axes, error)
        line[0].set_ylabel(label)
    for axes in grid[:-1, 0]:
        axes.set_ylim(bottom=0)
    _memory_axis(grid[-1, 0], load_cluster(clusters[0]).gpu.memory / 1e9)
    _finish(figure, grid, counts)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _rate(cell: dict[str, Any]) -> float:
    return float(cell["rate"] / cell["gpus"])


def _gigabytes(cell: dict[str, Any]) -> float:
    return float(cell["memory"] / 1e9)


def _panel(axes: Axes, names: tuple[str, ...], cells: Cells, cluster: str, value: Any) -> None:
    """The lines of a family on a cluster."""

    def points(name: str) -> tuple[list[int], list[float]]:
        found = sorted((g, cell) for (c, n, g), cell in cells.items() if (c, n) == (cluster, name))
        return [g for g, _ in found], [value(cell) for _, cell in found]

    axes.plot(*points(REFERENCE), **GREY)
    for name, (colour, marker, line) in zip(names, STYLES, strict=False):
        style = {"color": colour, "marker": marker, "ls": line, "ms": 5, "lw": 1.4}
        axes.plot(*points(name), label=name.removeprefix("DDP, "), **style)
    axes.grid(alpha=0.3)


def _band(axes: Axes, error: float) -> None:
    """Where the reference may really be: an error is predicted over measured, less 1."""
    gpus, rates = (np.asarray(numbers) for numbers in axes.lines[0].get_data())
    axes.fill_between(gpus, rates / (1 + error), rates / (1 - error), color="#E8E8E8", zorder=0)


def _memory_axis(axes: Axes, capacity: float) -> None:
    """A logarithmic axis of plain numbers; what a GPU has, if it is near."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if capacity < 2 * high:
        for panel in axes.figure.axes:
            if panel.get_subplotspec().is_last_row():
                panel.axhline(capacity, color="#555555", lw=1, ls=(0, (6, 2)))
                text = f"a GPU has {capacity:.0f} GB"
                panel.text(256, 1.05 * capacity, text, ha="right", size=8, color="#555555")
        high = max(high, 1.2 * capacity)
    axes.set_ylim(low, high)
    ticks = [t for t in GIGABYTES if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks([], minor=True)


def _finish(figure: Figure, grid: Any, counts: tuple[int, ...]) -> None:
    """Titles, legends and the axis of GPUs."""
    for axes, family in zip(grid[0], FAMILIES, strict=True):
        lines, labels = axes.get_legend_handles_labels()
        style = {"fontsize": 8, "frameon": False, "loc": "lower left", "borderaxespad": 0.2}
        axes.legend(lines, labels, bbox_to_anchor=(0, 1.0), title=family, alignment="left", **style)
        axes.get_legend().get_title().set(fontweight="bold", fontsize=9)
    for axes in grid[-1]:
        axes.set(xscale="log", xlabel="GPUs")
        axes.set_xticks(counts, [str(g) for g in counts])
        axes.set_xticks([], minor=True)
