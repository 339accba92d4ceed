"""Diagrams of phase 2: attention shared out over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from distlab.hardware.clusters import Link, load_cluster
from solutions.phase2_advanced.all_to_all_attention import (
    Layer,
    all_to_all_seconds,
    crossing,
    ring_seconds,
)
from solutions.phase2_advanced.context_parallel import own_positions, visible

from .letters import SMALL
from .plots import axes
from .registry import ROOT, diagram
from .shapes import Cell, row
from .sheet import INNER, MARGIN, RANKS, Sheet

RANK_COUNT = 3
CHUNKS = 2 * RANK_COUNT
SIDE = 28.0  # of a cell

Seen = dict[tuple[int, int], str]  # (query chunk, key chunk): the words in its cell


def zigzag() -> tuple[list[int], Seen]:
    """The owner of each chunk, and the step in which a pair of chunks is multiplied."""
    chunks = [own_positions([CHUNKS], rank, RANK_COUNT).tolist() for rank in range(RANK_COUNT)]
    owner = [next(r for r, own in enumerate(chunks) if c in own) for c in range(CHUNKS)]
    seen: Seen = {}
    for rank in range(RANK_COUNT):
        for step in range(RANK_COUNT):
            source = (rank - step) % RANK_COUNT
            for queries, keys, masked in visible(rank, source, [1]):
                rows, columns = chunks[rank][queries], chunks[source][keys]
                hidden = {(rows[-1], c) for c in columns if masked and c > rows[-1]}
                seen |= {(q, k): str(step) for q in rows for k in columns if (q, k) not in hidden}
    return owner, seen


def in_a_row() -> tuple[list[int], Seen]:
    """The same with two neighbouring chunks on each rank."""
    owner = [chunk // 2 for chunk in range(CHUNKS)]
    pairs = [(q, k) for q in range(CHUNKS) for k in range(q + 1)]
    return owner, {(q, k): str((owner[q] - owner[k]) % RANK_COUNT) for q, k in pairs}


@diagram("2.22", "Two chunks per rank: in a row, and zig-zag")
def placements(sheet: Sheet) -> None:
    ways: tuple[tuple[str, Callable[[], tuple[list[int], Seen]]], ...]
    ways = ("in a row", in_a_row), ("zig-zag", zigzag)
    top = sheet.y
    for index, (name, placement) in enumerate(ways):
        owner, seen = placement()
        left = MARGIN + 58 + index * INNER / 2
        sheet.text(left + CHUNKS * SIDE / 2, top + 8, name, anchor="middle", bold=True)
        for chunk in range(CHUNKS):
            x, y = left + chunk * SIDE + SIDE / 2, top + 48 + chunk * SIDE
            sheet.text(x, top + 32, f"k{chunk}", anchor="middle", size=SMALL)
            sheet.text(left - 56, y + SIDE / 2, f"q{chunk} r{owner[chunk]}", size=SMALL)
        for query in range(CHUNKS):
            for key in range(CHUNKS):
                words, y = seen.get((query, key)), top + 48 + query * SIDE
                tone = "plain" if words is None else RANKS[owner[query]]
                sheet.box(left + key * SIDE, y, SIDE - 3, SIDE - 3, words or "", tone)
        work = [sum(owner[query] == rank for query, _ in seen) for rank in range(RANK_COUNT)]
        share = max(work) / (sum(work) / RANK_COUNT)
        bottom = top + 56 + CHUNKS * SIDE
        for rank, count in enumerate(work):
            y = bottom + rank * 24
            sheet.text(left - 56, y + 9, f"rank {rank}", size=SMALL)
            sheet.box(left, y, count * 13, 18, str(count), RANKS[rank])
        words = f"slowest/mean {share:.2f}"
        sheet.text(left, bottom + RANK_COUNT * 24 + 8, words, size=SMALL)
    sheet.gap(56 + CHUNKS * SIDE + RANK_COUNT * 24 + 26)
    sheet.note(
        f"W = {RANK_COUNT}, {CHUNKS} chunks; q0 r0: rank 0 has the queries of chunk 0. The number "
        "in a cell is the step in which the pair is multiplied. Empty: the mask hides it. Below: "
        "pairs of chunks per rank."
    )


@cache
def balance() -> dict[str, Any]:
    """The numbers of ``python -m benchmarks.context_balance``."""
    file = ROOT / "benchmarks" / "context_balance.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


@diagram("2.22-2", "Measured: how long each of 8 ranks multiplies")
def measured_balance(sheet: Sheet) -> None:
    found = balance()
    longest = max(max(took) for took in found["milliseconds"].values())
    for way, name in (("row", "in a row"), ("zigzag", "zig-zag")):
        took = found["milliseconds"][way]
        share = max(took) * len(took) / sum(took)
        sheet.text(MARGIN, sheet.y + 8, f"{name}: slowest/mean {share:.2f}", bold=True)
        for rank, each in enumerate(took):
            y, width = sheet.y + 22 + rank * 19, (INNER - 175) * each / longest
            sheet.text(MARGIN, y + 8, f"rank {rank}", size=SMALL)
            slowest = each == max(took)
            sheet.box(MARGIN + 56, y, width, 15, "", "red" if slowest else "grey", strong=slowest)
            words = f"{each:.1f} ms" + ", slowest" * slowest
            sheet.text(MARGIN + 62 + width, y + 8, words, size=SMALL)
        sheet.gap(28 + len(took) * 19 + 10)
    positions = 2 * found["ranks"] * found["chunk"]
    sheet.note(
        f"The products of one forward and backward: {positions:,} positions, {found['heads']} "
        f"heads of {found['width']} features, float32. Processor time; the ranks ran one after "
        "another, without messages."
    )


@diagram("2.23", "Heads are exchanged for positions, and back")
def exchange(sheet: Sheet) -> None:
    ranks, heads, positions = range(2), "ab", (1, 2, 3, 4)
    of_positions = [
        [f"{h}{p}" for h in heads for p in positions if (p - 1) // 2 == r] for r in ranks
    ]
    of_heads = [[f"{heads[r]}{p}" for p in positions] for r in ranks]

    def both(title: str, held: list[list[str]], next_: list[list[str]]) -> None:
        sheet.note(title, bold=True)
        for rank in ranks:
            moves = [cell not in next_[rank] for cell in held[rank]]
            cells = [
                Cell(cell, RANKS[heads.index(cell[0])], strong=leaves)
                for cell, leaves in zip(held[rank], moves, strict=True)
            ]
            row(sheet, f"rank {rank}", cells, w=60)

    both("between layers: two positions of all heads", of_positions, of_heads)
    both("after the all-to-all: all positions of one head; attention runs here",
         of_heads, of_positions)  # fmt: skip
    sheet.note(
        "A letter is a head, a number a position. Cells with a bold border travel in the next "
        "all-to-all: half of them, (W-1)/W for W ranks."
    )


@diagram("2.23-2", "From some length on the ring is as fast: it hides its messages")
def ring_or_all_to_all(sheet: Sheet) -> None:
    cluster, ranks = load_cluster("dgx-h100"), 8
    lengths = [2.0**power for power in range(10, 21)]

    def layer(link: Link) -> Layer:
        return Layer(
            batch=1, heads=32, kv_heads=32, features=128, itemsize=2, ranks=ranks,
            flops=cluster.gpu.flops["bfloat16"], alpha=0.0, beta=link.beta,
        )  # fmt: skip

    plot = axes(sheet, (lengths[0], lengths[-1]), (0, 4.2), height=170, log_x=True)
    plot.frame(
        {2.0**power: f"{2 ** (power - 10):,}k" for power in range(10, 21, 2)},
        {0: "0", 1: "1", 2: "2", 3: "3", 4: "4"},
        "positions T of the sequence",
        "time of the ring / time with all-to-alls, forward",
    )
    plot.line([(lengths[0], 1), (lengths[-1], 1)], "grey", dashed=True, k=False)
    told = []
    for name, link, tone in (
        ("inside a node", cluster.inside, "blue"),
        ("between nodes", cluster.between, "red"),
    ):
        one = layer(link)
        at = crossing(one)
        every = sorted([*(2.0 ** (power / 4) for power in range(40, 81)), at])
        curve = [(n, ring_seconds(one, n) / all_to_all_seconds(one, n)) for n in every]
        plot.line(curve, tone, dashed=tone == "red")
        plot.word(*min(curve, key=lambda point: abs(point[1] - 2.2)), name, tone, up=10)
        told.append(f"{at:,.0f} positions {name}")
    sheet.note(
        f"8 ranks of dgx-h100 in bfloat16, 32 heads of q, k and v, without latency. The ring is "
        f"never slower from {told[0]} on, and from {told[1]} on."
    )
