"""The picture of the scale curves: seconds and bytes, measured and by the formulas."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .curves_fit import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = {
    "ranks": "ranks",
    "nbytes": "bytes of the tensor",
    "numbers": "numbers in the model",
    "tensors": "tensors of the model",
}
# Okabe & Ito 2008: colour-blind readers tell them apart; in print markers and lines do
STYLES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."))
GREY = "#B0B0B0"


def panels(found: list[Measured]) -> dict[str, list[Measured]]:
    """The curves by their panel: those of one kind of program over one variable."""
    made: dict[str, list[Measured]] = {}
    for each in found:
        kind = each.curve.what.partition(",")[0]
        where = "virtual ranks" if each.curve.cluster else "this machine"
        made.setdefault(f"{kind} over {UNITS[each.curve.over]}, {where}", []).append(each)
    return made


def draw(found: list[Measured], cores: int, path: Path) -> None:
    """A column per panel: seconds above, bytes below; lines are the formulas, markers measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    every = panels(found)
    figure, grid = plt.subplots(
        2, len(every), figsize=(3.3 * len(every), 6.4), layout="constrained", squeeze=False
    )
    for column, (title, curves) in zip(grid.T, every.items(), strict=True):
        head, _, where = title.rpartition(", ")
        column[0].set_title(f"{head}\n{where}", fontsize=9)
        for style, each in zip(STYLES, curves, strict=True):
            seconds = [statistics.median(starts) for starts in each.starts]
            name = each.curve.what.partition(", ")[2]
            _curve(column[0], style, each, seconds, each.growth.predicted, name)
            wanted = [each.curve.sent(setting) for setting in each.curve.points]
            _curve(column[1], style, each, each.sent, wanted, name)
        for axes, label in zip(column, ("seconds", "bytes that a rank sends"), strict=True):
            _axes(axes, curves[0], label, cores)
        column[0].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _curve(
    axes: Axes, style: tuple[str, str, str], each: Measured, got: Any, wanted: Any, name: str
) -> None:
    colour, marker, line = style
    axes.plot(each.x, wanted, line, color=colour, lw=1)
    axes.plot(each.x, got, marker, color=colour, ms=5, label=name)


def _axes(axes: Axes, first: Measured, label: str, cores: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(UNITS[first.curve.over])
    axes.set_ylabel(label)
    axes.grid(color="#E5E5E5")
    if first.curve.over == "ranks" and not first.curve.cluster:
        axes.axvspan(cores * 1.1, first.x[-1] * 1.1, color=GREY, alpha=0.25, lw=0)
        axes.text(cores * 1.2, 0.02, "more ranks than cores", transform=axes.get_xaxis_transform(),
                  fontsize=7)  # fmt: skip
