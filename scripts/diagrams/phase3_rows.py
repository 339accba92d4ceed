"""The diagram of exercise 3.32: rows of each parameter, in a message by rank."""

from __future__ import annotations

from .registry import diagram
from .shapes import Cell, row
from .sheet import RANKS, Sheet


@diagram("3.32", "Each parameter is cut by its rows; only the message joins them")
def rows(sheet: Sheet) -> None:
    ranks, sizes = 3, {"w": 5, "b": 3}
    most = {name: -(-count // ranks) for name, count in sizes.items()}
    x, w = 122.0, 42.0

    def cell(name: str, k: int) -> Cell:
        there = k < sizes[name]
        return Cell(f"{name}{k}" if there else "·", RANKS[k // most[name]], dashed=not there)

    def whole(name: str, *, padded: bool = False) -> list[Cell | None]:
        return [cell(name, k) for k in range(ranks * most[name] if padded else sizes[name])]

    def own(rank: int, *, padded: bool = True) -> list[Cell | None]:
        mine = [(n, k) for n in sizes for k in range(rank * most[n], (rank + 1) * most[n])]
        return [cell(name, k) for name, k in mine if padded or k < sizes[name]]

    row(sheet, "parameters", [*whole("w"), None, *whole("b")], x=x, w=w)
    for rank in range(ranks):
        row(sheet, f"rank {rank} keeps", own(rank, padded=False), x=x, w=w)
    sheet.gap(6)
    row(sheet, "all-gather", [each for rank in range(ranks) for each in own(rank)], x=x, w=w)
    copied = [*whole("w", padded=True), None, *whole("b", padded=True)]
    row(sheet, "copied out", copied, x=x, w=w)
    sheet.note(
        "w has 5 rows, b has 3. A colour is a rank, · is padding, in messages only. Copying brings "
        "the rows of each parameter side by side. The gradients take the same way back."
    )
