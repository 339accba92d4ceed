"""Diagrams of phase 2: the router of a mixture of experts, and tokens that travel to experts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch

from solutions.phase2_advanced.mixture_of_experts import choose, keep_first

from .plots import axes
from .registry import ROOT, diagram
from .shapes import Cell, row
from .sheet import RANKS, Sheet

TOLD = {"none": ("red", "none"), "loss": ("orange", "balance loss"), "bias": ("green", "bias")}


@diagram("2.24", "An expert with room for two takes the first two; others are dropped")
def router(sheet: Sheet) -> None:
    chances = torch.tensor(
        [[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]
    )
    experts, _ = choose(chances, torch.zeros(3), 1)
    room = 2
    kept = keep_first(experts, 3, room)
    tokens = range(len(chances))
    w = 82
    row(sheet, "token", [Cell(str(t), "plain", bold=True) for t in tokens], w=w)
    for expert in range(3):
        cells = [
            Cell(f"{chances[t, expert]:g}", RANKS[expert], strong=True, hatch=not kept[t, 0])
            if experts[t, 0] == expert
            else Cell(f"{chances[t, expert]:g}", "grey")
            for t in tokens
        ]
        row(sheet, f"expert {expert}", cells, w=w)
    load = [int((experts == e).sum()) for e in range(3)]
    sheet.note(
        f"Coloured: the best expert of each token. Load {load[0]}, {load[1]}, {load[2]}. The "
        f"capacity is ⌈1·1·5/3⌉ = {room}, so the hatched choice of token 2 finds no room: expert 0 "
        "computes nothing for it."
    )


@cache
def measured() -> dict[str, Any]:
    """The numbers of ``python -m benchmarks.moe_balance``."""
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "moe_balance.json").read_text("utf-8")
    )
    return found


@diagram("2.24-2", "Balancing decides how much room is needed")
def balance(sheet: Sheet) -> None:
    found = measured()
    kinds, steps = found["kinds"], found["steps"]
    plot = axes(sheet, (0, steps), (0, found["experts"]), height=130, left=40, right=110)
    plot.frame(
        {0: "0", steps / 2: f"{steps // 2}", steps: f"{steps}"},
        {0: "0", 1: "1", 4: "4", 8: "8"},
        "step",
        "load of the busiest expert, times the mean",
    )
    plot.line([(0, 1), (steps, 1)], "grey", dashed=True, k=False)
    for kind, (tone, words) in TOLD.items():
        loads = kinds[kind]["busiest"]
        means = [(i + 5, sum(loads[i : i + 10]) / 10) for i in range(0, steps, 10)]
        plot.line(means, tone, dashed=kind == "loss")
        plot.word(steps, means[-1][1], words, tone)
    factors = [*zip(found["factors"], range(len(found["factors"])), strict=True)]
    plot = axes(sheet, (0, 8), (0, 1), height=130, left=40, right=110)
    plot.frame(
        {c: f"{c:g}" for c in (1, 2, 4, 6, 8)},
        {0: "0", 0.5: "50 %", 1: "100 %"},
        "capacity factor c",
        "share of choices that are dropped at the end",
    )
    for kind, (tone, words) in TOLD.items():
        points = [(c, kinds[kind]["dropped"][i]) for c, i in factors]
        plot.line(points, tone, dashed=kind == "loss")
        x, y = {"none": points[7], "loss": points[5], "bias": points[1]}[kind]
        plot.word(x, y, words, tone, up=10 if kind != "bias" else -6)
    sheet.note(
        f"Eight experts, one for each image, {steps} steps of {found['batch']} images. All three "
        "begin with the same weights."
    )


@diagram("2.25", "Rows travel to the rank of their expert, and back")
def journey(sheet: Sheet) -> None:
    chosen = ((2, 0, 3, 0), (0, 2))  # the experts of rank 0's tokens, and of rank 1's
    names = [[f"{'ab'[rank]}{t}" for t in range(len(tokens))] for rank, tokens in enumerate(chosen)]
    leave = [sorted(zip(tokens, names[rank], strict=True)) for rank, tokens in enumerate(chosen)]
    come = [[[r for r in rows if r[0] // 2 == rank] for rows in leave] for rank in range(2)]

    def cells(rows: list[tuple[int, str]]) -> list[Cell]:
        return [Cell(f"{name} → {e}", RANKS[e], name[0] == "b") for e, name in rows]

    def both(title: str, rows: list[list[tuple[int, str]]]) -> None:
        sheet.note(title, bold=True)
        for rank in range(2):
            row(sheet, f"rank {rank}", cells(rows[rank]), w=80)

    both("tokens and their experts", [
        [*zip(tokens, names[rank], strict=True)] for rank, tokens in enumerate(chosen)
    ])  # fmt: skip
    both("sorted by expert; the sizes travel", leave)
    both("dispatch: the rows of experts 0, 1 on rank 0, of 2, 3 on rank 1", [
        [r for part in parts for r in part] for parts in come
    ])  # fmt: skip
    both("the rows of an expert together: one product each", [
        sorted(r for part in parts for r in part) for parts in come
    ])  # fmt: skip
    sheet.note(
        "The arrow points at a row's expert, its colour is the expert's; rows of rank 1 have bold "
        "borders. Then everything runs backwards: undo the sort, combine, and each row is at its "
        "token."
    )
