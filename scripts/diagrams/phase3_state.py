"""Diagrams of phase 3: state dicts, full and in shards."""

from __future__ import annotations

from .phase3_sharding import LEFT, named, ranges, spelled, vector
from .registry import diagram
from .shapes import Cell, row
from .sheet import MARGIN, RANKS, WIDTH, Sheet


@diagram("3.20", "A rank has the overlap of two ranges: its shard, a parameter")
def full_state(sheet: Sheet) -> None:
    elements, shard = named({"w": 8, "b": 3}, 3)
    w = vector(sheet, elements, {"w": "blue", "b": "green"})
    parts = [ranges(elements, r * shard, (r + 1) * shard) for r in range(3)]
    cells = [
        Cell(f"rank {r}: {spelled(part)}", "plain", strong=True, wide=shard)
        for r, part in enumerate(parts)
    ]
    row(sheet, "shards", cells, x=LEFT, w=w, below=14)
    row(
        sheet,
        "state dict",
        [Cell("w, 8 elements", "blue", wide=8), Cell("b, 3 elements", "green", wide=3)],
        x=LEFT,
        w=w,
    )
    sheet.note(
        "To save, one rank gathers unit by unit. To load, every rank takes its overlaps and "
        "sends nothing. · is padding."
    )


@diagram("3.28", "Any number of ranks finds its elements in the old pieces")
def resharded(sheet: Sheet) -> None:
    sizes = {"w": 8, "b": 3}
    for ranks, word in ((3, "saved by 3"), (2, "loaded by 2")):
        elements, shard = named(sizes, ranks)
        real = [e for e in elements if e != "·"]
        w = (WIDTH - MARGIN - LEFT) / 12
        if ranks == 3:
            numbers = [e + str(index - real.index(e)) for index, e in enumerate(real)]
            tones = [RANKS[index // shard] for index in range(len(real))]
            row(
                sheet,
                "elements",
                [Cell(n, t) for n, t in zip(numbers, tones, strict=True)],
                x=LEFT,
                w=w,
            )
        cells = []
        for rank in range(ranks):
            count = min((rank + 1) * shard, len(real)) - rank * shard
            part = ", ".join(
                spelled([p]) for p in ranges(elements, rank * shard, (rank + 1) * shard)
            )
            cells.append(
                Cell(
                    f"r{rank}: {part}",
                    RANKS[rank] if ranks == 3 else "plain",
                    ranks == 2,
                    wide=count,
                )
            )
        row(sheet, word, cells, x=LEFT, w=w, below=12)
    old = named(sizes, 3)[1]
    new = named(sizes, 2)[1]
    for rank in range(2):
        pieces = sorted({index // old for index in range(rank * new, min((rank + 1) * new, 11))})
        sheet.note(
            f"Rank {rank} of 2 reads from the pieces of old ranks {' and '.join(map(str, pieces))}."
        )
    sheet.note("Each piece says which elements of its parameter it has. Nothing is sent.")
