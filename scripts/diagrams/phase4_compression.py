"""Diagrams of phase 4: compressed gradients."""

from __future__ import annotations

import torch

from .letters import SMALL
from .registry import diagram
from .shapes import Cell, flow, row
from .sheet import INNER, MARGIN, RANKS, Sheet


def shown(value: float) -> str:
    """A number without a sign for zero."""
    return f"{round(value, 2) + 0.0:g}"


@diagram("4.6", "Nothing is thrown away, it is only late")
def top_k(sheet: Sheet) -> None:
    residuals = [[0.3, -2.1, 0.1, 0.4], [0.2, 0.1, 0.3, 1.5]]
    x, w = MARGIN + 116, 54
    bucket = [0.0] * 4
    for rank, values in enumerate(residuals):
        chosen = max(range(4), key=lambda k: abs(values[k]))
        bucket[chosen] += values[chosen]
        cells = [
            Cell(shown(v), RANKS[rank] if k == chosen else "grey", k == chosen)
            for k, v in enumerate(values)
        ]
        row(
            sheet,
            f"rank {rank}: v + g",
            cells,
            x=x,
            w=w,
            after=f"sends ({chosen}, {shown(values[chosen])})",
        )
        kept = [Cell(shown(0 if k == chosen else v), "plain") for k, v in enumerate(values)]
        row(sheet, "keeps", kept, x=x, w=w, below=12)
    row(
        sheet,
        "bucket",
        [Cell(shown(v), "green", bool(v)) for v in bucket],
        x=x,
        w=w,
        after="on all ranks",
    )
    sheet.note(
        "k = 1. Values and indices are gathered by all, so the result is the same everywhere."
    )


@diagram("4.6-2", "Momentum before the choice, not after it")
def momentum_correction(sheet: Sheet) -> None:
    common = ["+ v", "top k", "gather"]
    for name, begin, end in (
        ("error feedback alone", [], "optimizer with\nmomentum"),
        ("momentum correction", ["u ← m·u + g"], "optimizer with-\nout momentum"),
    ):
        sheet.note(name, bold=True)
        cells = [Cell("g", wide=0.5), *(Cell(word, "orange", wide=1.5) for word in begin)]
        cells += [Cell(word, wide=0.9) for word in common]
        flow(sheet, [*cells, Cell(end, "blue", wide=1.9)], apart=16)
    sheet.note("Where something was sent, u is cleared as well as v.")


@diagram("4.7", "Equal seeds, equal positions: no index travels")
def random_k(sheet: Sheet) -> None:
    numbers, count, calls = 24, 3, 3
    generator = torch.Generator().manual_seed(7)
    x, w = MARGIN + 60, (INNER - 60) / numbers
    for call in range(calls):
        chosen = sorted(torch.randperm(numbers, generator=generator)[:count].tolist())
        sheet.note(f"call {call}: positions {', '.join(map(str, chosen))}", bold=True)
        for rank in range(2):
            cells = [
                Cell(
                    "v" if k in chosen else "", RANKS[rank] if k in chosen else "plain", k in chosen
                )
                for k in range(numbers)
            ]
            row(sheet, f"rank {rank}", cells, x=x, w=w, h=22, below=2)
        sheet.gap(8)
    sheet.note(
        f"Both ranks draw the same {count} of {numbers} positions from one seed, anew at every "
        f"call. An all-reduce adds these {count} numbers; the rest waits in the residual."
    )


@diagram("4.8", "Two thin matrices travel instead of a large one")
def power_sgd(sheet: Sheet) -> None:
    m, n, r = 70.0, 120.0, 18.0
    top = sheet.y + 26
    middle = top + 60
    x = float(MARGIN)

    def matrix(width: float, height: float, name: str, tone: str, strong: bool = False) -> None:
        nonlocal x
        sheet.box(x, middle - height / 2, width, height, name, tone, strong=strong)
        x += width

    def sign(words: str, width: float = 26) -> None:
        nonlocal x
        sheet.text(x + width / 2, middle, words, anchor="middle")
        x += width

    matrix(n, m, "M_r, m × n", "grey")
    sign("×")
    matrix(r, n, "", "blue")
    sheet.text(x - r / 2, top - 12, "Q", anchor="middle")
    sign("=")
    matrix(r, m, "", "orange", True)
    sheet.text(x - r / 2, top - 12, "P", anchor="middle")
    sheet.arrow([(x + 5, middle), (x + 77, middle)], k=True)
    sheet.text(x + 41, middle - 14, "all-reduce", anchor="middle", size=SMALL)
    sheet.text(x + 41, middle + 14, "then QR", anchor="middle", size=SMALL)
    x += 82
    matrix(r, m, "", "orange")
    sheet.text(x - r / 2, top - 12, "P", anchor="middle")
    sign("×")
    matrix(n, r, "", "blue", True)
    sheet.text(x - n / 2, top - 12, "Qᵀ", anchor="middle")
    sheet.y = top + 128
    sheet.note(
        "Bold: summed over the ranks by an all-reduce; Q = Mᵀ·P with the new P. P·Qᵀ is the "
        "projection of the mean gradient. The next step begins with this Q (warm start)."
    )
    rows, columns, rank = 512, 512, 2
    full, thin = rows * columns, rank * (rows + columns)
    for words, size, tone in (
        (f"m·n = {full:,}", full, "grey"),
        (f"r(m+n) = {thin:,}", thin, "green"),
    ):
        width = max(3, 250 * size / full)
        sheet.box(MARGIN, sheet.y, width, 22, "", tone)
        sheet.text(MARGIN + width + 8, sheet.y + 11, words)
        sheet.gap(28)
    sheet.note(f"m = n = {rows}, r = {rank}: {full // thin} times fewer numbers.")


@diagram("4.9", "Few bits per number, without a bias")
def quantised(sheet: Sheet) -> None:
    value = 2.3
    low = int(value)
    up = value - low
    sheet.note(f"int8: x/s = {value:g} is rounded at random, right in the mean", bold=True)
    left, unit, line = MARGIN + 60.0, 130.0, sheet.y + 62
    sheet.path([(left - 20, line), (left + 3 * unit + 20, line)])
    for k in range(4):
        at = left + k * unit
        sheet.path([(at, line - 4), (at, line + 4)])
        sheet.text(at, line + 16, str(k + low - 1), anchor="middle")
    for k, share in ((1, 1 - up), (2, up)):
        height = 60 * share
        sheet.box(left + k * unit - 12, line - height - 1, 24, height, "", "green")
        sheet.text(left + k * unit, line - height - 13, f"{share:.0%}", anchor="middle")
    at = left + unit * (1 + up)
    sheet.arrow([(at, line - 40), (at, line - 3)], "red", k=True)
    sheet.text(at, line - 52, f"{value:g}", anchor="middle", tone="red", bold=True)
    sheet.y = line + 34
    mean = low * (1 - up) + (low + 1) * up
    sheet.note(
        f"⌊{value:g} + u⌋ with u in [0, 1): the mean is {1 - up:g}·{low} + {up:g}·{low + 1} = "
        f"{mean:g}."
    )
    sheet.gap(6)
    sheet.note("one bit with error feedback", bold=True)
    v = [0.5, -0.2, 1.4]
    size = sum(map(abs, v)) / len(v)
    sent = [size if entry > 0 else -size for entry in v]
    owed = [entry - s for entry, s in zip(v, sent, strict=True)]
    for words, values, tone, after in (
        ("residual + g = v", v, "grey", f"s = mean |v| = {size:g}"),
        ("sent: a sign each", sent, "orange", "sent + residual = v"),
        ("new residual", owed, "blue", "comes with the next g"),
    ):
        row(
            sheet,
            words,
            [Cell(shown(entry), tone) for entry in values],
            x=MARGIN + 150,
            w=62,
            after=after,
        )
