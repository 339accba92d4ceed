"""The diagrams of exercise 3.33: who holds, counts and sums a parameter, and what a step sends."""

from __future__ import annotations

import json

from .letters import SMALL
from .registry import ROOT, diagram
from .shapes import Cell, row
from .sheet import MARGIN, RANKS, Sheet

TOLD = {  # axes, in any order: what travels, and its tone
    frozenset({"data", "expert", "context"}): ("gradients", "blue"),
    frozenset({"tensor"}): ("activations", "orange"),
    frozenset({"context"}): ("keys and values", "green"),
    frozenset({"expert"}): ("tokens to experts", "purple"),
    frozenset({"data", "context"}): ("gradients of experts", "blue"),
    frozenset({"pipeline"}): ("activations of stages", "orange"),
    frozenset({"pipeline", "data", "expert", "context"}): ("gradient of the embedding", "blue"),
    frozenset({"data", "expert", "context", "tensor"}): ("gradients of routers", "blue"),
}


@diagram("3.33", "A parameter's gradient is summed along the axes that copy it")
def mesh(sheet: Sheet) -> None:
    sizes = {"pipeline": 2, "data": 2, "tensor": 2}

    def cell(rank: int, stage: int) -> Cell:
        p, _, t = rank // 4, rank // 2 % 2, rank % 2
        return Cell(f"W{t}" if p == stage else "·", RANKS[t], dashed=p != stage)

    ranks = range(8)
    row(sheet, "rank", [Cell(str(r), RANKS[r % 2]) for r in ranks], x=122.0, w=42.0)
    for dim, axis in enumerate(sizes):
        here = [(r >> (2 - dim)) % 2 for r in ranks]
        row(sheet, axis, [Cell(str(c), RANKS[c]) for c in here], x=122.0, w=42.0)
    sheet.gap(6)
    row(sheet, "W of stage 1", [cell(r, 1) for r in ranks], x=122.0, w=42.0)
    counts = [Cell("1" if r in (4, 5) else "·", RANKS[r % 2], r in (4, 5)) for r in ranks]
    row(sheet, "counts W", counts, x=122.0, w=42.0)
    sheet.note(
        "tensor cuts W, data copies it, pipeline leaves it to stage 1. So its gradient is averaged "
        "over the data lines 4, 6 and 5, 7. Ranks 4 and 5 count and write its blocks."
    )


@diagram("3.33-2", "Every strategy has its axis, and gradients travel along several")
def traffic(sheet: Sheet) -> None:
    found = json.loads((ROOT / "benchmarks" / "mesh_bytes.json").read_text("utf-8"))
    most, begin, widest = found["rows"][0]["counted"], 240.0, 110.0
    for each in found["rows"]:
        words, tone = TOLD.get(frozenset(each["axes"]), ("the norm", "grey"))
        nbytes = each["counted"]
        told = f"{nbytes / 1e6:.2f} MB" if nbytes > 1e4 else f"{nbytes} B"
        middle, end = sheet.y + 9, begin + max(2.0, widest * nbytes / most)
        axes = " · ".join(each["axes"]) if len(each["axes"]) < 5 else "all five"
        sheet.text(MARGIN, middle, axes, size=SMALL)
        sheet.box(begin, sheet.y, end - begin, 18, tone=tone)
        sheet.text(end + 6, middle, f"{told}: {words}", size=SMALL)
        sheet.y += 24
    best, other = (each["milliseconds"] for each in found["orders"])
    sheet.note(
        "Bytes that 32 ranks send in one step, by the axes of the messages, with two ranks on each "
        f"of five axes. On nodes of 8 virtual GPUs the messages take {best:.1f} ms of virtual time "
        f"if the tensor ranks are neighbours, and {other:.1f} ms if their axis comes first."
    )
