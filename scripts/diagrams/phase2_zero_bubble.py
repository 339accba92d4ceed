"""Diagrams of phase 2: zero bubble with stages in a V."""

from __future__ import annotations

from solutions.phase2_advanced.pipeline_schedules import Schedule, peak_live, replay
from solutions.phase2_advanced.zero_bubble_v import (
    dual_pipe_v,
    interleaved_zero_bubble,
    zero_bubble_v,
)

from .phase2_pipelines import TONES
from .registry import diagram
from .shapes import Cell, flow
from .sheet import INNER, MARGIN, RANKS, Sheet
from .times import Bar, lanes


@diagram("2.26", "Down to the last rank and back: a V of stages")
def shape_of_a_v(sheet: Sheet) -> None:
    ranks, apart, right = 3, 44.0, 70.0
    width = INNER - right
    w = (width - apart * (ranks - 1)) / ranks
    for rank in range(ranks):
        middle = MARGIN + rank * (w + apart) + w / 2
        sheet.text(middle, sheet.y + 8, f"rank {rank}", anchor="middle", bold=True)
    sheet.y += 22
    down = [Cell(f"stage {rank}", RANKS[rank]) for rank in range(ranks)]
    flow(sheet, down, width=width, apart=apart)
    end, top = sheet.y - 6, sheet.y + 26
    sheet.y = top
    up = [Cell(f"stage {2 * ranks - 1 - rank}", RANKS[rank]) for rank in range(ranks)]
    flow(sheet, up, width=width, apart=apart, back=True)
    turn = MARGIN + width - w / 2
    sheet.arrow([(turn, end), (turn, top - 2)], dashed=True)
    sheet.text(turn + 10, (end + top) / 2, "turn: no message")
    sheet.note(
        "Forward follows the arrows, backward goes against them. Data enter at rank 0, and the "
        "loss is on rank 0, too. Four arrows cross a border between ranks: a micro-batch sends "
        f"4(p-1) = {4 * (ranks - 1)} messages in forward and backward."
    )


def both_stages(sheet: Sheet, order: Schedule) -> None:
    """A lane per rank: kind and micro-batch. Steps of its second stage have a bold border."""
    found, ranks = replay(order), len(order)
    rows = {
        f"r{rank}": [
            Bar(a, b, f"{s.kind}\n{s.micro_batch}", TONES[s.kind], strong=s.stage >= ranks)
            for s, a, b in spans
        ]
        for rank, spans in enumerate(found.spans)
    }
    lanes(sheet, rows, found.seconds, label=24, h=36, apart=6)
    sheet.gap(4)


@diagram("2.26-2", "The same bubble, and three places to wait")
def three_orders(sheet: Sheet) -> None:
    ranks, m = 2, 4
    orders = {
        "interleaved zero bubble": interleaved_zero_bubble(ranks, m, 2),
        "ZB-V": zero_bubble_v(ranks, m),
        "DualPipe-V": dual_pipe_v(ranks, m),
    }
    for name, order in orders.items():
        sheet.note(f"{name}: a rank keeps {max(peak_live(order))}", bold=True)
        both_stages(sheet, order)
    assert len({replay(order).seconds for order in orders.values()}) == 1
    sheet.note(
        f"Bold border: a rank's second stage. All take 6m + p-1 = {6 * m + ranks - 1}. "
        "Interleaved, rank 0 waits for its first gradient. A rank of ZB-V that has begun never waits. In "
        "DualPipe-V a forward stands beside the B and W of another micro-batch and stage."
    )
