"""Diagrams of phase 4: where the time of a step goes."""

from __future__ import annotations

import statistics

from solutions.phase4_production.monitoring import covered

from .letters import SMALL
from .registry import diagram
from .shapes import Cell, row
from .sheet import INNER, MARGIN, Sheet
from .times import Bar, lanes, ticks


@diagram("4.10", "Exposed: the program waits. Hidden: it computes meanwhile")
def step_metrics(sheet: Sheet) -> None:
    data, forward, backward, ready, takes = 9.0, 26.0, 56.0, (36.0, 47.0), (13.0, 18.0)
    wire: list[Bar] = []
    for number, (begin, length) in enumerate(zip(ready, takes, strict=True)):
        start = max([begin, *(bar.end for bar in wire)])
        wire.append(Bar(start, start + length, f"bucket {number}", "orange"))
    arrived = wire[-1].end
    end = arrived + 9
    host = [
        Bar(0, data, "data", "grey"),
        Bar(data, forward, "forward", "blue"),
        Bar(forward, backward, "backward", "blue"),
        Bar(backward, arrived, "wait", "red", dashed=True),
        Bar(arrived, end, "opt", "green"),
    ]
    exposed = arrived - backward
    hidden = (
        covered([(ready[0], wire[0].end), (ready[1], wire[1].end), (backward, arrived)]) - exposed
    )
    shares = [
        Bar(ready[0], backward, f"hidden: {hidden:g} ms", "purple"),
        Bar(backward, arrived, f"{exposed:g} ms", "red", strong=True),
    ]
    where = lanes(sheet, {"host": host, "wire": wire, "parts": shares}, end, h=30)
    ticks(sheet, where, {ready[0]: "b0", ready[1]: "b1 ready", arrived: "arrived"})
    sheet.note(
        f"b0, b1: a bucket is ready. Exposed (bold): {exposed:g} ms, from the end of backward "
        "until all has arrived. Hidden: the time in flight, less exposed. Two buckets in flight "
        "are one wire."
    )


@diagram("4.17", "Each product costs twice results times terms")
def flops(sheet: Sheet) -> None:
    rows, inner, out = 4, 5, 7
    unit = 9.0

    def product(name: str, a: tuple[int, int, str], b: tuple[int, int, str], words: str) -> None:
        terms, results = a[1], a[0] * b[1]
        sheet.note(name, bold=True)
        height = unit * max(a[0], b[0]) + 8
        middle, x = sheet.y + height / 2, MARGIN + 8.0
        for index, (r, c, label) in enumerate((a, b, (a[0], b[1], f"({a[0]}, {b[1]})"))):
            sheet.box(
                x, middle - r * unit / 2, c * unit, r * unit, "", ("blue", "orange", "green")[index]
            )
            x += c * unit
            sheet.text(x + 4, middle, label, size=SMALL)
            x += 68
            if index < 2:
                sheet.text(x + 2, middle, "@="[index], anchor="middle")
                x += 20
        sheet.text(
            INNER + MARGIN,
            middle,
            f"2·{results}·{terms} = {2 * results * terms}",
            anchor="end",
            bold=True,
        )
        sheet.y += height + 4
        if words:
            sheet.note(words)

    product(
        "forward", (rows, inner, f"x ({rows}, {inner})"), (inner, out, f"w ({inner}, {out})"), ""
    )
    product(
        "backward, gradient of x: only if it is needed",
        (rows, out, f"g ({rows}, {out})"),
        (out, inner, "wᵀ (7, 5)"),
        "",
    )
    product(
        "backward, gradient of w", (inner, rows, "xᵀ (5, 4)"), (rows, out, f"g ({rows}, {out})"), ""
    )
    sheet.gap(4)
    sheet.note(
        "A multiplication and an addition are two FLOPs. Convolution: 2 · results · elements of "
        "w[0], as every result meets one filter."
    )


@diagram("4.11", "All step times are equal; own times are not")
def stragglers(sheet: Sheet) -> None:
    own = [7.0, 8.0, 20.0, 7.0]
    end = max(own) + 0.6
    rows = {}
    for rank, time in enumerate(own):
        slowest = time == max(own)
        mine = Bar(0, time, f"own: {time:g}", "red" if slowest else "blue", strong=slowest)
        wait = Bar(time, end, "" if slowest else "exposed", "grey", dashed=True)
        rows[f"rank {rank}"] = [mine, wait]
    where = lanes(sheet, rows, end, right=100)
    for rank, (time, middle) in enumerate(zip(own, where.middle, strict=True)):
        others = [t for r, t in enumerate(own) if r != rank]
        ratio = time / statistics.median_low(others)
        sheet.text(
            where.x(end) + 10,
            middle,
            f"{ratio:.2f} × others",
            size=SMALL,
            tone="red" if ratio > 1.2 else "plain",
            bold=ratio > 1.2,
        )
    slow = own.index(max(own))
    others = [t for r, t in enumerate(own) if r != slow]
    usual = statistics.median_low(others)
    spread = statistics.median_low(abs(t - usual) for t in others)
    z = (max(own) - statistics.mean(own)) / statistics.stdev(own)
    limit = (len(own) - 1) / len(own) ** 0.5
    sheet.gap(4)
    sheet.note(
        f"Compared with the others' median: for rank {slow} it is {usual:g}, their MAD {spread:g}. "
        f"Mean and standard deviation of all four give z = {z:.2f}; no rank of four can have more "
        f'than {limit:g}, so "three sigma" never fires.'
    )


@diagram("4.12", "One rank writes, to several places")
def sinks(sheet: Sheet) -> None:
    positions = {
        "JSON lines": "complete, for programs",
        "TensorBoard": "curves, for people",
        "Prometheus": "last value, for alarms",
        "terminal": "is it alive?",
    }
    top, x, w = sheet.y, MARGIN + 170.0, 120.0
    middle = top + 2 * 34 - 4
    sheet.box(MARGIN, middle - 16, 90, 32, "rank 0", "blue", strong=True)
    for number, (name, what) in enumerate(positions.items()):
        y = top + number * 34
        sheet.box(x, y, w, 28, name, "orange")
        sheet.arrow([(MARGIN + 92, middle), (x - 3, y + 14)])
        sheet.text(x + w + 10, y + 14, what)
    sheet.y = top + 4 * 34 + 2
    row(sheet, "", [Cell("ranks 1 … W-1", "grey", wide=1)], x=MARGIN, w=130, after="write nothing")


@diagram("4.12-2", "After a kill the file is cut back to the checkpoint")
def cut_back(sheet: Sheet) -> None:
    every, saved = 10, 45
    steps = (40, 50, 60)
    sheet.note(f"the file; the checkpoint is of step {saved}", bold=True)
    cells = []
    for step in steps[:-1]:
        kept = step <= saved
        cells.append(Cell(f'{{"step": {step}, …}}', "green" if kept else "grey", dashed=not kept))
    cells.append(Cell(f'{{"step": {steps[-1]}, "lo', "red", dashed=True))
    width = INNER / 3
    row(sheet, "", cells, x=MARGIN, w=width)
    words = ["kept" if step <= saved else "will come again" for step in steps[:-1]]
    for number, word in enumerate([*words, "torn"]):
        sheet.text(MARGIN + (number + 0.5) * width, sheet.y + 6, word, anchor="middle")
    sheet.gap(24)
    sheet.note(
        f"A report every {every} steps. What is kept is written aside and put in the file's place "
        "in one move."
    )
