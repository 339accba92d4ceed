"""Diagrams of phase 2: micro-batches, the batch size, and fewer bits."""

from __future__ import annotations

import math

from solutions.phase2_advanced.batch_size import scaled_learning_rate

from .letters import SMALL
from .plots import axes
from .registry import diagram
from .shapes import Cell, flow, row
from .sheet import MARGIN, RANKS, Sheet
from .times import Bar, lanes


@diagram("2.1", "Each target counts alike if all are divided by the total")
def micro_batches(sheet: Sheet) -> None:
    targets = (1, 7, 3)
    total = sum(targets)
    w, x, cells = 38, MARGIN + 86, []
    last = 0
    for number, count in enumerate(targets):
        cells += [Cell(f"l{last + k + 1}", RANKS[number]) for k in range(count)]
        last += count
    row(sheet, "targets", cells, x=x, w=w)
    names = [
        Cell(f"m{k}: {n}" if n > 1 else f"m{k}", RANKS[k], wide=n) for k, n in enumerate(targets)
    ]
    row(sheet, "backward", names, x=x, w=w, below=16)
    for words, weights, tone in (
        (f"divided by {total}, the window's total: right", [1 / total] * 3, "green"),
        ("mean of the means: wrong", [1 / len(targets) / n for n in targets], "red"),
    ):
        sheet.note(f"weight of a target, {words}", tone=tone, bold=True)
        bottom = sheet.y + 6 + 180 * max(weights)
        position = x
        for count, weight in zip(targets, weights, strict=True):
            height = 180 * weight
            for _ in range(count):
                sheet.box(position, bottom - height, w - 3, height, "", tone)
                position += w
            middle = position - count * w / 2 - 2
            share = f"1/{round(1 / weight)}"
            sheet.text(middle, bottom + 11, share, anchor="middle", size=SMALL)
        sheet.y = bottom + 28
    sheet.note(
        "Each backward adds to p.grad; its activations are free before the next micro-batch begins."
    )


@diagram("2.2", "Gradients travel once per step, not once per backward")
def one_reduction(sheet: Sheet) -> None:
    work = {0: 3, 1: 1, 2: 0}
    rows: dict[str, list[Bar]] = {}
    each, first = 1.5, 1.8
    start = first + each * max(work.values())
    for rank, count in work.items():
        bars = [Bar(0.0, 0.6, "n", RANKS[rank])]
        bars += [
            Bar(first + k * each, first + (k + 1) * each, f"back {k}", RANKS[rank])
            for k in range(count)
        ]
        rows[f"rank {rank}"] = [*bars, Bar(start + 1.25, start + 2.2, "step", "grey")]
    where = lanes(sheet, rows, start + 2.2, h=30)
    for left, right in ((0.65, first - 0.05), (start + 0.05, start + 1.2)):
        x1, x2 = where.x(left), where.x(right)
        sheet.box(
            x1,
            where.top - 2,
            x2 - x1,
            where.bottom - where.top + 4,
            "all-\nreduce",
            "orange",
            strong=True,
        )
    sheet.gap(4)
    sheet.note(
        "First the counts n are added to the total, by which every loss is divided. So a plain "
        "sum of the gradients is their mean. Rank 2 has no micro-batch and takes part with zeros."
    )


@diagram("2.3", "One factor for all gradients: shorter, same direction")
def clipping(sheet: Sheet) -> None:
    flow(
        sheet,
        [
            Cell("accumulate"),
            Cell("reduce over\nranks", "orange"),
            Cell("unscale"),
            Cell("norm,\nclip", "blue", True),
            Cell("step"),
        ],
    )
    sheet.gap(4)
    gradient, limit = (12.0, 5.0), 6.5
    norm = math.hypot(*gradient)
    clipped = tuple(limit / norm * g for g in gradient)
    alone = (min(gradient[0], limit), min(gradient[1], limit))
    plot = axes(sheet, (0, 15), (0, 7.5), height=190, left=40, right=110)
    plot.frame(
        {n: str(n) for n in (0, 5, 10)},
        {n: str(n) for n in (0, 5)},
        "gradient of p1",
        "gradient of p2",
    )
    circle = [
        (limit * math.cos(k * math.pi / 60), limit * math.sin(k * math.pi / 60)) for k in range(31)
    ]
    plot.line(circle, "grey", dashed=True, k=False)
    sheet.arrow([plot.at(0, 0), plot.at(*gradient)], "blue")
    sheet.arrow([plot.at(0, 0), plot.at(*clipped)], "green", k=True)
    sheet.arrow([plot.at(0, 0), plot.at(*alone)], "red", dashed=True)
    plot.word(*gradient, f"norm {norm:g}", "blue", up=-12)
    plot.word(clipped[0] + 0.8, 1.6, f"clipped: norm {limit:g}", "green")
    plot.word(*alone, "each by itself: turned", "red", up=14)
    sheet.note(
        f"The arc is the limit, {limit:g}. The factor is {limit:g}/{norm:g} = {limit / norm:g} "
        f"for every gradient, so the step becomes ({clipped[0]:g}, {clipped[1]:g})."
    )


def tried(most: list[int], upper: int) -> list[int]:
    """The sizes that are tried: doubled while they fit, then bisected."""
    sizes, fits, fails = [], 0, 1
    while fails <= upper:
        sizes.append(fails)
        if fails > min(most):
            break
        fits, fails = fails, 2 * fails
    fails = min(fails, upper + 1)
    while fails - fits > 1:
        sizes.append((fits + fails) // 2)
        fits, fails = (sizes[-1], fails) if sizes[-1] <= min(most) else (fits, sizes[-1])
    return sizes


@diagram("2.4", "Double until a size does not fit, then bisect, all together")
def memory_search(sheet: Sheet) -> None:
    most = [9, 6]
    sizes = tried(most, 100)
    w = 62
    row(sheet, "size", [Cell(str(size), "plain", bold=True) for size in sizes], w=w)
    for rank, limit in enumerate(most):
        cells = [
            Cell("✓" if size <= limit else "✗", "green" if size <= limit else "red")
            for size in sizes
        ]
        row(sheet, f"rank {rank}", cells, w=w, after=f"{limit} fit")
    fit = [size <= min(most) for size in sizes]
    cells = [Cell("✓" if ok else "✗", "green" if ok else "red", True) for ok in fit]
    row(
        sheet,
        "minimum",
        cells,
        w=w,
        after=f"→ {max(s for s, ok in zip(sizes, fit, strict=True) if ok)}",
    )
    double = fit.index(False) + 1
    words = [
        Cell("doubling", "grey", wide=double),
        Cell("bisection", "grey", wide=len(sizes) - double),
    ]
    row(sheet, "", words, w=w)
    sheet.note(
        "After each trial the ranks agree by one all-reduce, so that all try the same size next."
    )


@diagram("2.4-2", "A k times larger batch: the rate climbs to k·η")
def warm_up(sheet: Sheet) -> None:
    base, k, steps = 0.1, 4, 5
    rates = [
        scaled_learning_rate(
            t, base_lr=base, base_batch=256, global_batch=256 * k, warmup_steps=steps
        )
        for t in range(9)
    ]
    plot = axes(sheet, (0, 8), (0, 0.45), height=140, left=70)
    plot.frame({0: "0", steps: "T", 8: ""}, {base: "η", k * base: "k·η"}, "step t", "learning rate")
    plot.line(list(enumerate(rates)), "blue")
    for t, rate in enumerate(rates):
        sheet.circle(*plot.at(t, rate), 4, "blue")
    plot.word(2.2, rates[2], "η + (k·η - η)·t/T", "blue", up=-18)
    sheet.note(
        f"k = {k} here. SGD: a step on k batches at once must move as far as k steps. With Adam "
        "√k·η is the usual rule."
    )


@diagram("2.28", "Sums add up over the ranks, means do not")
def group_statistics(sheet: Sheet) -> None:
    values = ((1, 3), (), (8,))
    sums = [(len(v), sum(v), sum(x * x for x in v)) for v in values]
    w, total = 46, tuple(map(sum, zip(*sums, strict=True)))
    for rank, own in enumerate(values):
        cells: list[Cell | None] = [Cell(str(x), RANKS[rank]) for x in own]
        cells += [None] * (2 - len(own))
        if not own:
            cells[0] = Cell("no row", "grey", dashed=True, wide=2)
            cells.pop()
        after = [
            Cell(f"{name} = {number}", RANKS[rank], wide=2)
            for name, number in zip(("n", "Σx", "Σx²"), sums[rank], strict=True)
        ]
        row(sheet, f"rank {rank}", [*cells, None, *after], w=w)
    told = zip(("n", "Σx", "Σx²"), total, strict=True)
    cells = [Cell(f"{name} = {number}", "plain", bold=True, wide=2) for name, number in told]
    row(sheet, "all-reduce", [None, None, None, *cells], w=w)
    n, first, second = total
    mean, var = first / n, second / n - (first / n) ** 2
    means = [s / count for count, s, _ in sums if count]
    sheet.note(
        f"On every rank: mean {first}/{n} = {mean:g}, variance {second}/{n} - {mean:g}² = "
        f"{var:.2f}."
    )
    sheet.note(
        f"The mean of the ranks' means would be {sum(means) / len(means):g}: wrong.", tone="red"
    )
