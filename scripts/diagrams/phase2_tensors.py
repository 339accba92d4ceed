"""Diagrams of phase 2: tensor and sequence parallelism, random streams."""

from __future__ import annotations

import numpy as np
import torch

from .letters import SMALL
from .phase3_rings import panels
from .registry import diagram
from .shapes import Cell, flow, row
from .sheet import INNER, MARGIN, RANKS, Sheet


def fan(sheet: Sheet, x: float, one: str, many: tuple[str, str], *, summed: bool) -> None:
    """One box and two, arrows to the two; ``summed``: from them, added up on the way."""
    top, w, h, apart = sheet.y, 74.0, 30.0, 66.0
    right = x + 2 * apart - 30 + w - 6
    tone = "green" if summed else "grey"
    sheet.box(x, top + 22, w, h, one, tone, strong=summed)
    for rank, words in enumerate(many):
        y = top + rank * 44
        sheet.box(right, y, w, h, words, RANKS[rank])
        ends = [(x + w + 3, top + 37), (right - 3, y + 15)]
        sheet.arrow(ends[::-1] if summed else ends, k=summed)


@diagram("2.14", "The backward of one function is the forward of the other")
def conjugate(sheet: Sheet) -> None:
    left, right = MARGIN + 4, MARGIN + INNER / 2 + 14
    sheet.text(left + 90, sheet.y + 8, "forward", anchor="middle", bold=True)
    sheet.text(right + 90, sheet.y + 8, "backward", anchor="middle", bold=True)
    sheet.gap(24)
    cases = (
        (
            "copy_to_ranks (f)",
            ("x", ("rank 0", "rank 1"), False),
            ("dx", ("grad 0", "grad 1"), True),
        ),
        (
            "sum_over_ranks (g)",
            ("y", ("term 0", "term 1"), True),
            ("dy", ("rank 0", "rank 1"), False),
        ),
    )
    for name, forward, backward in cases:
        sheet.note(name, bold=True)
        for x, (one, many, summed) in ((left, forward), (right, backward)):
            fan(sheet, x, one, many, summed=summed)
        sheet.gap(88)
    sheet.note(
        "Bold arrows: an all-reduce adds up. Thin arrows: no message, every rank has it already."
    )


def matrix(sheet: Sheet, x: float, y: float, rank: int, *, rows: bool) -> None:
    """A weight of which a rank has the upper or lower rows, or the left or right columns."""
    w, h = 60.0, 44.0
    sheet.box(x, y, w, h, "", "plain", dashed=True)
    if rows:
        sheet.box(x, y + rank * h / 2, w, h / 2, f"Θ{'₀₁'[rank]}", RANKS[rank])
    else:
        sheet.box(x + rank * w / 2, y, w / 2, h, f"Θ{'₀₁'[rank]}", RANKS[rank])


@diagram("2.15", "Cut by columns, then by rows: one all-reduce for two layers")
def two_layers(sheet: Sheet) -> None:
    heads = ["x (all)", "rows of Θ", "own features", "columns of Θ", "term", "y (all)"]
    top, w, apart = sheet.y + 26, 60.0, 31.0
    x0 = MARGIN + 24
    for index, head in enumerate(heads):
        x = x0 + index * (w + apart) + w / 2
        sheet.text(x, sheet.y + 8, head, anchor="middle", size=SMALL)
    for rank in range(2):
        y = top + rank * 74
        middle = y + 22
        sheet.text(MARGIN, middle, f"r{rank}", size=SMALL)
        words = ["x", "", f"y{'₀₁'[rank]}", "", f"term {rank}", "y"]
        for index, word in enumerate(words):
            x = x0 + index * (w + apart)
            if word:
                tone = "grey" if word in "xy" else RANKS[rank]
                sheet.box(x, middle - 16, w, 32, word, tone, strong=word == "y")
            else:
                matrix(sheet, x, y, rank, rows=index == 1)
            if index < 4:
                sheet.arrow([(x + w + 4, middle), (x + w + apart - 4, middle)])
    x = x0 + 4 * (w + apart) + w
    for rank in range(2):
        for other in range(2):
            sheet.arrow(
                [(x + 3, top + 22 + rank * 74), (x + apart - 3, top + 22 + other * 74)], k=True
            )
    sheet.y = top + 134
    sheet.note(
        "First layer column-parallel: a function of each feature alone (GELU) may follow. Second "
        "layer row-parallel: the terms are summed by an all-reduce (bold), then b is added once. "
        '"Columns" are those of A in Y = X·A.'
    )


@diagram("2.16", "Each rank looks up its own words; a sum joins the rows")
def vocabulary(sheet: Sheet) -> None:
    size, ranks, words = 13, 3, [3, 12, 7]
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    owner = [
        next(r for r in range(ranks) if bounds[r] <= word < bounds[r + 1]) for word in range(size)
    ]
    x = MARGIN + 96
    row(
        sheet,
        "vocabulary",
        [Cell(str(k), RANKS[owner[k]], k in words) for k in range(size)],
        x=x,
        w=33,
    )
    held = [Cell(f"rank {r}", RANKS[r], wide=bounds[r + 1] - bounds[r]) for r in range(ranks)]
    row(sheet, "", held, x=x, w=33, below=16)
    row(sheet, "words", [Cell(str(word), "plain", bold=True) for word in words], x=x, w=56)
    for rank in range(ranks):
        cells = [
            Cell(
                f"E{word}" if owner[word] == rank else "0",
                RANKS[rank] if owner[word] == rank else "grey",
            )
            for word in words
        ]
        row(sheet, f"rank {rank}", cells, x=x, w=56)
    row(
        sheet,
        "all-reduce",
        [Cell(f"E{word}", "purple", True) for word in words],
        x=x,
        w=56,
        after="on all ranks",
    )
    sheet.note(
        "A word's row comes from its owner; all others add zeros. Ranks differ by one word at "
        "most, nothing is padded."
    )


@diagram("2.17", "Whole heads and whole features per rank, one sum at the end")
def block(sheet: Sheet) -> None:
    zone = {"all": "grey", "cut": "blue", "sum": "orange"}
    for name, inner in (
        ("attention", ["q k v of\nmy heads", "attention", "out"]),
        ("MLP", ["up: my\nfeatures", "GELU", "down"]),
    ):
        sheet.note(name, bold=True)
        cells = [
            Cell("norm, copy\nto ranks", zone["all"]),
            *(Cell(word, zone["cut"]) for word in inner),
        ]
        flow(sheet, [*cells, Cell("all-reduce,\n+ bias, + x", zone["sum"], wide=1.1)], apart=16)
    sheet.note(
        "Grey: replicated. Blue: cut, a part on each rank. Orange: the sum over the ranks, "
        "replicated again; + x is the residual."
    )


@diagram("2.17-2", "Rank r needs block r of q, of k and of v")
def fused_rows(sheet: Sheet) -> None:
    ranks = 3
    names = [f"{kind}{head}" for kind in "qkv" for head in range(ranks)]
    w = 46
    row(sheet, "whole", [Cell(n, RANKS[int(n[1])]) for n in names], w=w)
    row(
        sheet,
        "first cut",
        [Cell(f"rank {r}: wrong", "red", dashed=True, wide=3) for r in range(ranks)],
        w=w,
        x=MARGIN + 74,
    )
    order = [f"{kind}{rank}" for rank in range(ranks) for kind in "qkv"]
    row(sheet, "reordered", [Cell(n, RANKS[int(n[1])]) for n in order], w=w)
    row(
        sheet,
        "then cut",
        [Cell(f"rank {r}: right", "green", True, wide=3) for r in range(ranks)],
        w=w,
    )


@diagram("2.18", "Between the layers each rank keeps its positions only")
def sequence(sheet: Sheet) -> None:
    length, ranks = 4, 2
    term = [[Cell(f"{t}", RANKS[r], dashed=True) for t in range(length)] for r in range(ranks)]
    whole = [[Cell(f"{t}", "grey") for t in range(length)] for _ in range(ranks)]
    empty = Cell("", "plain", dashed=True)
    part = [
        [Cell(f"{t}", RANKS[r], True) if t * ranks // length == r else empty for t in range(length)]
        for r in range(ranks)
    ]
    sheet.note("tensor parallel: an all-reduce, the norm sees all T positions", bold=True)
    panels(
        sheet,
        ["terms of row layer", "all-reduce", "norm", "column layer"],
        [term, whole, whole, whole],
    )
    sheet.note("sequence parallel: the same bytes, the norm sees T/W", bold=True)
    panels(
        sheet,
        ["terms of row layer", "reduce-scatter", "norm", "all-gather"],
        [term, part, part, whole],
    )
    sheet.note(
        "A number is a position, T = 4. Dashed with a number: a term that must still be summed. "
        "Backward goes the other way: an all-gather where forward has a reduce-scatter, and a "
        "reduce-scatter where it has an all-gather."
    )


def drawn(seed: int, stream: int, count: int) -> list[int]:
    """A stream's first masks, seeded as by RandomStreams; stream 0 is the replicated one."""
    state = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    return (torch.rand(count, generator=generator) < 0.7).int().tolist()


@diagram("2.19", "Two streams per rank: one drawn alike, one of its own")
def streams(sheet: Sheet) -> None:
    ranks, seed, each = 2, 1, 4
    common = drawn(seed, 0, 2 * each)
    grids = []
    for part in range(3):
        grid = []
        for rank in range(ranks):
            numbers = (
                drawn(seed, 1 + rank, each) if part == 1 else common[part // 2 * each :][:each]
            )
            tone = RANKS[rank] if part == 1 else "grey"
            grid.append([Cell(str(n), tone) for n in numbers])
        grids.append(grid)
    panels(sheet, ["residual: replicated", "inside: sharded", "residual: replicated"], grids)
    for index, words in enumerate(("equal", "differ", "equal")):
        room = (INNER - 58) / 3
        sheet.text(MARGIN + 58 + index * room + 76, sheet.y + 4, words, anchor="middle", bold=True)
    sheet.gap(22)
    sheet.note(
        "Dropout masks, time to the right. Inside attention and MLP each rank has its own heads "
        "and features, so its numbers are its own. Afterwards the replicated stream goes on "
        "where it was."
    )
