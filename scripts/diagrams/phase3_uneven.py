"""The diagram of exercise 3.31: ranks with different numbers of batches."""

from __future__ import annotations

from .registry import diagram
from .shapes import Cell, row
from .sheet import RANKS, Sheet


@diagram("3.31", "A rank without a batch shadows, until no rank has one")
def uneven(sheet: Sheet) -> None:
    counts = (2, 4, 1)
    steps = range(max(counts))
    x, w = 148.0, 90.0
    row(sheet, "", [Cell(f"step {step}", "plain") for step in steps], x=x, w=w)
    for rank, count in enumerate(counts):
        cells = [
            Cell(f"batch {step}", RANKS[rank], strong=True)
            if step < count
            else Cell("shadow", "grey", dashed=True)
            for step in steps
        ]
        row(sheet, f"rank {rank}", cells, x=x, w=w, after="end")
    having = [[rank for rank, count in enumerate(counts) if step < count] for step in steps]
    means = [Cell(", ".join(map(str, ranks)), "orange") for ranks in having]
    row(sheet, "mean over ranks", means, x=x, w=w)
    row(sheet, "buffers of rank", [Cell(str(ranks[0]), "orange") for ranks in having], x=x, w=w)
    sheet.note(
        "Before each step all ranks tell the weight of their next batch, 0 without one. A shadow "
        "sends the same messages, with zeros, and all ranks take each step of the optimizer."
    )
