"""The calibration curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .outcome import ROUND, curve

MOST = 100.0  # a factor beyond it is drawn there


def draw(past: Sequence[dict[str, float]], path: Path) -> None:
    """Write a picture: how far off each prediction was, and how many of the last ten were right."""
    points = curve(past)
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    counts = [point.count for point in points]
    for right, colour, marker, label in (
        (True, "#0072b2", "o", "right"),
        (False, "#d55e00", "x", "not right"),
    ):
        chosen = [k for k, each in enumerate(past) if bool(each["right"]) is right]
        off = [min(past[k]["factor"], MOST) for k in chosen]
        upper.scatter([k + 1 for k in chosen], off, c=colour, marker=marker, label=label)
    medians = [min(point.factor, MOST) for point in points]
    upper.plot(counts, medians, color="#444444", label=f"median of the last {ROUND}")
    upper.set_yscale("log")
    ticks = [1, 2, 5, 10, 100]
    upper.set_yticks(ticks, ["right", "2 x", "5 x", "10 x", "100 x or more"])
    upper.minorticks_off()
    upper.set_ylim(0.9, MOST * 1.2)
    upper.set_ylabel("off by a factor of")
    upper.legend(loc="upper right")
    lower.plot(counts, [100 * point.right for point in points], color="#0072b2")
    lower.set_ylim(-3, 103)
    lower.set_ylabel(f"right, of the last {ROUND} (%)")
    lower.set_xlabel("predictions, in the order in which they were made")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for part in (upper, lower):
        part.grid(alpha=0.3)
    figure.suptitle("How good predictions have become")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
