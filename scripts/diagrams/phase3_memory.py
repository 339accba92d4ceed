"""Diagrams of phase 3: what a strategy needs, and which one to choose."""

from __future__ import annotations

from given.step_profile import Phase, Profile
from solutions.phase3_multi_node.sharding_strategies import Estimate, Links, estimate
from solutions.phase3_multi_node.strategy_memory import STRATEGIES

from .letters import SMALL
from .plots import axes
from .registry import diagram
from .sheet import MARGIN, Sheet

UNITS, SIZE, SAVED, RANKS = 5, 2, 1, 4  # units of 2 MB that leave 1 MB of activations, 4 ranks
NAMES = ("kept", "activations", "units in full, gradients", "gradients reduced")


def fsdp_moments() -> dict[str, tuple[float, float, float, float]]:
    """MB on a rank in each part of FSDP's step with Adam, in the order of NAMES."""
    kept = 3 * UNITS * SIZE / RANKS  # shards and two moments

    moments = {}
    for unit in range(1, UNITS + 1):
        full = SIZE * (2 if unit < UNITS else 1)
        moments[f"F{unit}"] = (kept, float(SAVED * unit), float(full), 0.0)
    for unit in range(UNITS, 0, -1):
        later = UNITS - unit
        full = SIZE * (2 if unit > 1 else 1)
        gradients = SIZE * (1 + (later > 0))
        moments[f"B{unit}"] = (
            kept,
            float(SAVED * unit),
            float(full + gradients),
            SIZE * later / RANKS,
        )
    return moments


def unit_profile(units: int, size: int, saved: int) -> Profile:
    """A model of equal units, each of one tensor, without a root."""
    sizes = (0, *[size] * units)
    forward = [Phase(unit, False, saved * unit, 0) for unit in range(1, units + 1)]
    backward = [Phase(unit, True, saved * unit + size, 0) for unit in range(units, 0, -1)]
    return Profile(sizes, sizes, sizes, 0, 2.0, saved * units, (*forward, *backward))


@diagram("3.27", "The peak is the largest sum of one moment")
def moments(sheet: Sheet) -> None:
    parts = fsdp_moments()
    tones = ("grey", "blue", "orange", "green")
    totals = {name: sum(values) for name, values in parts.items()}
    peak = max(totals, key=totals.__getitem__)
    plot = axes(sheet, (0, len(parts)), (0, 22), height=230, left=50)
    plot.frame({}, {n: f"{n} MB" for n in (0, 5, 10, 15, 20)}, "", "bytes on a rank")
    for position, (name, values) in enumerate(parts.items()):
        below = 0.0
        x, _ = plot.at(position + 0.12, 0)
        right, _ = plot.at(position + 0.88, 0)
        for letter, value, tone in zip("kaur", values, tones, strict=True):
            _, y1 = plot.at(0, below + value)
            _, y2 = plot.at(0, below)
            below += value
            if value:
                sheet.box(x, y1, right - x, y2 - y1, letter if y2 - y1 > 15 else "", tone)
        sheet.text((x + right) / 2, plot.y[1] + 14, name, anchor="middle", size=SMALL)
        if name == peak:
            sheet.text(
                (x + right) / 2,
                plot.at(0, below)[1] - 12,
                f"peak {below:g}",
                anchor="middle",
                bold=True,
            )
    sheet.gap(-6)
    for letter, name, tone in zip("kaur", NAMES, tones, strict=True):
        sheet.box(MARGIN, sheet.y, 22, 20, letter, tone)
        sheet.text(MARGIN + 30, sheet.y + 10, name)
        sheet.gap(24)
    sheet.gap(4)
    most = sum(max(values[k] for values in parts.values()) for k in range(4))
    sheet.note(
        f"FSDP, {UNITS} units of {SIZE} MB with Adam on {RANKS} ranks; F: forward of a unit, B: "
        f"backward. The sum of the four maxima, {most:g} MB, would be too much: they come at "
        "different moments."
    )


def candidates() -> list[Estimate]:
    """The six strategies for a billion float32 parameters on two nodes of eight GPUs."""
    profile = unit_profile(20, 200_000_000, 60_000_000)
    links = Links(between=100e9)
    return [estimate(profile, name, 2, 8, links=links) for name in STRATEGIES]


@diagram("3.21", "Of the strategies that fit, take the cheapest communication")
def strategies(sheet: Sheet) -> None:
    found, budget = candidates(), 10e9
    fits = [each for each in found if each.peak <= budget]
    chosen = min(fits, key=lambda each: each.seconds)
    plot = axes(sheet, (0, 20), (0, 140), height=210, left=60, right=70)
    ms = [each.seconds * 1e3 for each in found]
    plot.frame(
        {n: f"{n} GB" for n in (0, 5, 10, 15, 20)}, {n: f"{n} ms" for n in (0, 50, 100)},
        "peak of memory on a GPU", "communication of a step",
    )  # fmt: skip
    plot.line([(budget / 1e9, 0), (budget / 1e9, 140)], "red", dashed=True, k=False)
    plot.word(budget / 1e9, 132, f"budget {budget / 1e9:g} GB", "red")
    for each, time in zip(found, ms, strict=True):
        x, y = plot.at(each.peak / 1e9, time)
        fit = each in fits
        sheet.circle(x, y, 6, "green" if each is chosen else "blue" if fit else "grey", filled=fit)
        words = f"{each.strategy}{': chosen' if each is chosen else '' if fit else ': too large'}"
        sheet.text(x + 11, y + {"zero2": -9, "hybrid": 9}.get(each.strategy, 0), words, size=SMALL)
    sheet.note(
        "A billion float32 parameters, Adam, two nodes of 8 GPUs with 100 GB/s between, by the "
        "estimate of this exercise. Filled: fits. Offload pays on the bus for what it saves on "
        "the device."
    )
