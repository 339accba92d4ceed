"""Diagrams of phase 2: scales of 8-bit tensors, and the loss of a training with them."""

from __future__ import annotations

import json
from typing import Any

import torch

from solutions.phase2_advanced.low_precision import E4M3, quantise_blocks, restore

from .plots import axes
from .registry import ROOT, diagram
from .shapes import Cell, row
from .sheet import RANKS, Sheet

ROW = (0.5, 0.03, 0.002, -0.2, 0.01, 900.0, -0.004, 0.06)  # one outlier
TOLD = {
    "unscaled": ("red", "8 bits, scale 1"),
    "bfloat16": ("grey", "bfloat16"),
    "delayed": ("orange", "delayed"),
    "blocks": ("green", "blocks"),
}


@diagram("2.29", "An outlier costs its block the small numbers, and not the whole row")
def outlier(sheet: Sheet) -> None:
    x = torch.tensor([ROW])

    def cells(block: int) -> tuple[list[Cell], str]:
        short = quantise_blocks(x, block, E4M3)
        found = restore(short)[0].tolist()
        wrong = [abs(got / want - 1) > 0.07 for got, want in zip(found, ROW, strict=True)]
        scales = ", ".join(f"{scale:g}" for scale in (1 / short.inverse_scale[0]).tolist())
        shown = [
            Cell(f"{float(f'{value:.4f}'):g}", RANKS[i // block], hatch=wrong[i])
            for i, value in enumerate(found)
        ]
        return shown, scales

    row(sheet, "float32", [Cell(f"{v:g}", "plain", bold=abs(v) > 1) for v in ROW], w=56)
    for block, label in ((8, "one scale"), (4, "blocks")):
        shown, scales = cells(block)
        row(sheet, label, shown, w=56)
        sheet.note(f"scale: {scales}" if block == 8 else f"scales of the blocks of four: {scales}")
    sheet.note(
        "What e4m3 leaves of the row. Hatched: more than 7 % off, which is more than the rounding "
        "of a number in range. With blocks only the neighbours of the outlier suffer."
    )


def measured() -> dict[str, Any]:
    """The numbers of ``python -m benchmarks.low_precision_loss``."""
    path = ROOT / "benchmarks" / "low_precision_loss.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@diagram("2.29-2", "With scales, 8-bit products train as bfloat16 does")
def losses(sheet: Sheet) -> None:
    found = measured()
    kinds, steps, every = found["kinds"], found["steps"], found["every"]
    means = {
        kind: [sum(column) / len(column) for column in zip(*curves, strict=True)]
        for kind, curves in kinds.items()
    }
    plot = axes(sheet, (0, steps), (0, 2.4), height=140, left=40, right=110)
    marks = {0: "0", steps / 2: f"{steps // 2}", steps: f"{steps}"}
    plot.frame(marks, {0: "0", 1: "1", 2: "2"}, "step", "loss, mean of three seeds")
    for kind, (tone, words) in TOLD.items():
        line = [(i * every, value) for i, value in enumerate(means[kind])]
        plot.line(line, tone, dashed=kind != "bfloat16")
        if kind in ("unscaled", "bfloat16"):
            plot.word(*line[-1], words if kind == "unscaled" else "the other three", tone)
    plot = axes(sheet, (0, steps), (-0.5, 2), height=140, left=40, right=110)
    plot.frame(
        marks,
        {0: "0", 1: "1 %", 2: "2 %"},
        "step",
        "how much larger than with bfloat16 the loss is, three seeds each",
    )
    plot.line([(0, 1), (steps, 1)], "grey", dashed=True, k=False)
    for kind, up in (("delayed", 6), ("blocks", -6)):
        tone, words = TOLD[kind]
        for curve, base in zip(kinds[kind], kinds["bfloat16"], strict=True):
            more = [100 * (got / want - 1) for got, want in zip(curve, base, strict=True)]
            plot.line([(i * every, m) for i, m in enumerate(more)], tone, dashed=kind == "blocks")
        end = 100 * (means[kind][-1] / means["bfloat16"][-1] - 1)
        plot.word(steps, end, words, tone, up=up)
    sheet.note(
        f"Digits, 64 → {found['width']} → 10, {steps} steps of {found['batch']} images; blocks of "
        f"{found['block']}."
    )
