"""Diagrams of phase 2: zero bubble with stages in a V."""

from __future__ import annotations

from solutions.phase2_advanced.pipeline_schedules import Schedule, peak_live, replay
from solutions.phase2_advanced.zero_bubble import zero_bubble
from solutions.phase2_advanced.zero_bubble_v import zero_bubble_v

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
    sheet.text(turn + 10, (end + top) / 2, "no message")
    sheet.note(
        "Forward follows the arrows, backward goes against them. Data enter at rank 0, and the "
        "loss is on rank 0, too. Four arrows cross a border between ranks: a micro-batch sends "
        f"4(p-1) = {4 * (ranks - 1)} messages in forward and backward."
    )


def both_stages(sheet: Sheet, order: Schedule, cost: float, span: float) -> None:
    """A lane per rank; steps of its second stage have a bold border."""
    found, ranks = replay(order, dict.fromkeys("FBW", cost)), len(order)
    rows = {
        f"r{rank}": [
            Bar(a, b, f"{s.kind}{s.micro_batch}", TONES[s.kind], strong=s.stage >= ranks)
            for s, a, b in spans
        ]
        for rank, spans in enumerate(found.spans)
    }
    lanes(sheet, rows, span, label=24, apart=6)
    sheet.gap(4)


@diagram("2.26-2", "In a V a rank that has begun never waits")
def no_waiting(sheet: Sheet) -> None:
    ranks, m = 2, 3
    whole, halves = zero_bubble(ranks, m), zero_bubble_v(ranks, m)
    span = 2 * replay(whole).seconds
    sheet.note(f"ZB-H1, one stage per rank: takes {span:g}, a rank keeps {ranks}", bold=True)
    both_stages(sheet, whole, 2, span)
    seconds, kept = replay(halves).seconds, max(peak_live(halves))
    sheet.note(f"ZB-V, stages of half the size: takes {seconds:g}, a rank keeps {kept}", bold=True)
    both_stages(sheet, halves, 1, span)
    sheet.note(
        f"p = {ranks}, m = {m}. Bold border: a rank's second stage. In ZB-H1 rank 0 waits for its "
        "first gradient. In ZB-V the last stage is on rank 0 itself, so the gradient is there."
    )
