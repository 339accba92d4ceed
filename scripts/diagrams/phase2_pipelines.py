"""Diagrams of phase 2: pipelines and their schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from solutions.phase2_advanced.pipeline_parallel import gpipe, interleaved, one_f_one_b
from solutions.phase2_advanced.pipeline_schedules import (
    Schedule,
    Step,
    message_after,
    peak_live,
    replay,
    with_messages,
)
from solutions.phase2_advanced.stage_bounds import partition
from solutions.phase2_advanced.zero_bubble import zero_bubble

from .letters import SMALL
from .registry import diagram
from .shapes import Cell, flow, row
from .sheet import INNER, MARGIN, RANKS, WIDTH, Sheet
from .times import Bar, lanes

TONES = {"F": "blue", "B": "orange", "W": "green"}


def timeline(
    sheet: Sheet,
    schedule: Schedule,
    costs: Mapping[str, float] | None = None,
    *,
    span: float = 0,
    name: str = "rank ",
    keeps: bool = False,
) -> float:
    """A lane per rank, a rank's second stage in brackets; gives back the seconds."""
    found, ranks = replay(schedule, costs), len(schedule)

    def words(step: Step) -> str:
        short = f"{step.kind}{step.micro_batch}"
        return f"[{short}]" if step.stage >= ranks else short

    rows = {
        f"{name}{rank}": [Bar(a, b, words(step), TONES[step.kind]) for step, a, b in spans]
        for rank, spans in enumerate(found.spans)
    }
    label, right = 12.0 + 9 * len(name), 66.0 * keeps
    where = lanes(sheet, rows, span or found.seconds, label=label, right=right, apart=6)
    for middle, peak in zip(where.middle, peak_live(schedule), strict=True):
        if keeps:
            sheet.text(WIDTH - MARGIN, middle, f"keeps {peak}", anchor="end", size=SMALL)
    sheet.gap(4)
    return found.seconds


@diagram("2.8", "Activations go forward, their gradients come back")
def stages(sheet: Sheet) -> None:
    rows = {
        "stage 0": [Bar(0, 2, "F", "blue"), Bar(9.6, 13.6, "B", "orange")],
        "stage 1": [Bar(2.8, 4.8, "F", "blue"), Bar(4.8, 8.8, "B", "orange")],
    }
    where = lanes(sheet, rows, 13.6, h=32, apart=46)
    top, bottom = where.middle
    for x1, x2, up, words in ((2, 2.8, False, "y.detach()"), (8.8, 9.6, True, "x.grad")):
        ends = [
            (where.x(x1), bottom - 18 if up else top + 18),
            (where.x(x2), top + 18 if up else bottom - 18),
        ]
        sheet.arrow(ends, k=True)
        sheet.text(where.x(x2) + 6, (top + bottom) / 2, words)
    sheet.gap(6)
    sheet.note(
        "Stage 1 calls x.requires_grad_(), runs F and then B. Stage 0 waits, then calls "
        "y.backward() with the x.grad of stage 1. One rank works at a time. A broadcast tells "
        "the loss to all."
    )


@diagram("2.20", "The most expensive stage should cost least")
def divide(sheet: Sheet) -> None:
    costs, count = [9, 2, 2, 2, 2, 2, 2, 2, 9], 3
    average = sum(costs) / count
    even = [len(costs) * s // count for s in range(count + 1)]
    filled, load = [0], 0
    for position, cost in enumerate(costs):
        load += cost
        if load >= average and len(filled) < count:
            filled.append(position + 1)
            load = 0
    best = partition(costs, count)
    w = INNER / sum(costs)
    for words, bounds in (
        ("equally many layers", even),
        (f"filled until each has the average, {average:.1f}", [*filled, len(costs)]),
        ("best", best),
    ):
        loads = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        stage = [sum(position >= b for b in bounds[1:]) for position in range(len(costs))]
        sheet.note(f"{words}: the slowest stage costs {max(loads)}", bold=words == "best")
        cells = [Cell(str(c), RANKS[s], wide=c) for c, s in zip(costs, stage, strict=True)]
        row(sheet, "", cells, x=MARGIN, w=w, below=3)
        marks = [
            Cell(f"stage {s}: {load}", "plain", load == max(loads), wide=load)
            for s, load in enumerate(loads)
        ]
        row(sheet, "", marks, x=MARGIN, w=w, below=10)
    sheet.note(
        "A cell is a layer, as wide as it is expensive. All other stages wait for the one with "
        "the bold border."
    )


def aligned(schedule: Sequence[Sequence[Step]]) -> list[list[tuple[Step, int]]]:
    """Each rank's steps with a line for each, so that both ends of a message are on one line."""
    last = 1
    left = [list(reversed(steps)) for steps in schedule]
    out: list[list[tuple[Step, int]]] = [[] for _ in schedule]
    ends = {}
    for steps in schedule:
        for step in steps:
            pair = message_after(step, last) if step.kind in "FB" else None
            if pair:
                ends[pair[0]], ends[pair[1]] = pair[1], pair[0]
    line = [0, 0]
    while any(left):
        for rank, steps in enumerate(left):
            while steps and steps[-1] not in ends:
                out[rank].append((steps.pop(), line[rank]))
                line[rank] += 1
        if all(left):
            both = max(line)
            for rank, steps in enumerate(left):
                out[rank].append((steps.pop(), both))
                line[rank] = both + 1
    return out


@diagram("2.9", "A schedule is a list per rank; every send meets a receive")
def as_data(sheet: Sheet) -> None:
    lists = aligned(with_messages(gpipe(2, 2)))
    top, w, h = sheet.y + 26, 150.0, 28.0
    xs = (MARGIN + 60.0, WIDTH - MARGIN - 60 - w)
    for rank, x in enumerate(xs):
        sheet.text(x + w / 2, sheet.y + 8, f"rank {rank}, stage {rank}", anchor="middle", bold=True)
        for step, line in lists[rank]:
            message = " " in step.kind
            tone = "plain" if message else TONES[step.kind]
            sheet.box(
                x, top + line * (h + 4), w, h, str(step), tone, strong=not message, dashed=message
            )
            if step.kind.startswith("send"):
                y = top + line * (h + 4) + h / 2
                ends = [(xs[0] + w + 4, y), (xs[1] - 4, y)]
                sheet.arrow(ends if rank == 0 else ends[::-1], TONES[step.kind[-1]])
    sheet.y = top + (max(line for steps in lists for _, line in steps) + 1) * (h + 4) + 4
    sheet.note(
        "A step is (kind, stage, micro-batch); time goes down. Both lists are parts of one "
        "order, so nobody waits for ever."
    )


@diagram("2.21", "The lists alone tell idle time and memory")
def bubble(sheet: Sheet) -> None:
    ranks, batches = 2, 3
    schedule = gpipe(ranks, batches)
    found = replay(schedule)
    rows: dict[str, list[Bar]] = {}
    for rank, spans in enumerate(found.spans):
        rows[f"rank {rank}"] = [
            Bar(a, b, f"{s.kind}{s.micro_batch}", TONES[s.kind]) for s, a, b in spans
        ]
        live, since, kept = 0, 0.0, list[Bar]()
        peak = peak_live(schedule)[rank]
        for step, _, end in spans:
            if end > since and live:
                kept.append(
                    Bar(since, end, str(live), "purple" if live == peak else "grey", live == peak)
                )
            live += 1 if step.kind == "F" else -1
            since = end
        rows["kept" + " " * rank] = kept
    lanes(sheet, rows, found.seconds, apart=6)
    sheet.gap(6)
    busy = sum(b - a for spans in found.spans for _, a, b in spans)
    sheet.note(
        f"F takes 1, B takes 2. The {ranks} ranks are busy for {busy:g} of {ranks} · "
        f"{found.seconds:g}: the bubble is {found.bubble:g}. Kept: activations from F to B; bold "
        "is the peak."
    )


@diagram("2.10", "All forwards, then all backwards")
def fill_and_drain(sheet: Sheet) -> None:
    ranks, batches = 3, 3
    schedule = gpipe(ranks, batches)
    timeline(sheet, schedule, keeps=True)
    found = replay(schedule)
    sheet.note(
        f"Dashed: idle. The bubble is (p-1)/(m+p-1) = {ranks - 1}/{batches + ranks - 1} = "
        f"{found.bubble:.0%}. All m = {batches} micro-batches' activations are alive at once. B "
        "takes twice as long as F."
    )


@diagram("2.11", "A backward as early as possible frees memory early")
def one_one(sheet: Sheet) -> None:
    ranks, batches = 3, 4
    first, second = gpipe(ranks, batches), one_f_one_b(ranks, batches)
    sheet.note("1F1B", bold=True)
    seconds = timeline(sheet, second, keeps=True)
    sheet.note("GPipe, for comparison", bold=True)
    timeline(sheet, first, keeps=True)
    assert seconds == replay(first).seconds
    sheet.note(
        f"p = {ranks}, m = {batches}. Both take {seconds:g} and idle equally long. Rank r keeps "
        "min(m, p-r) micro-batches instead of m."
    )


@diagram("2.12", "Smaller stages, several per rank: a smaller bubble")
def many_stages(sheet: Sheet) -> None:
    plain, fine = one_f_one_b(2, 2), interleaved(2, 2, 2)
    whole = {"F": 2.0, "B": 4.0}
    span = replay(plain, whole).seconds
    sheet.note(f"1F1B, both stages as one: takes {span:g}", bold=True)
    timeline(sheet, plain, whole, name="r")
    seconds = replay(fine).seconds
    sheet.note(f"interleaved, v = 2: takes {seconds:g}", bold=True)
    timeline(sheet, fine, span=span, name="r")
    idle = [
        time - sum(b - a for _, a, b in replay(s, c).spans[0])
        for s, c, time in ((plain, whole, span), (fine, None, seconds))
    ]
    sheet.note(
        f"In brackets: a rank's second stage. p = 2, m = 2: each rank is idle for {idle[1]:g} "
        f"instead of {idle[0]:g}. A micro-batch goes round v times."
    )


@diagram("2.13", "Gradients of weights can wait, and fill idle time")
def no_bubble(sheet: Sheet) -> None:
    ranks, batches = 3, 4
    plain, split = one_f_one_b(ranks, batches), zero_bubble(ranks, batches)
    span = replay(plain).seconds
    sheet.note(f"1F1B: 3(m+p-1) = {span:g}", bold=True)
    timeline(sheet, plain)
    seconds = replay(split).seconds
    sheet.note(f"ZB-H1: 3m + p-1 = {seconds:g}", bold=True)
    timeline(sheet, split, span=span)
    sheet.note(
        "In ZB-H1 F, B and W take 1 each; the B of 1F1B does both and takes 2. B: the input's "
        "gradient, which the rank before waits for. W: the weights' gradient. No rank keeps more "
        "than p micro-batches."
    )


@diagram("2.13-2", "Each layer has a graph of its own, so W can come later")
def splitting(sheet: Sheet) -> None:
    sheet.note("outer graph: B goes through here", bold=True)
    middles = flow(
        sheet,
        [
            Cell("Split", "orange"),
            Cell("activation", "orange"),
            Cell("Split", "orange"),
            Cell("loss", "orange"),
        ],
        apart=34,
    )
    sheet.gap(26)
    for x, y in (middles[0], middles[2]):
        sheet.arrow([(x, y + 24), (x, sheet.y - 2)], dashed=True)
        sheet.box(x - 56, sheet.y, 112, 44, "x → y\nwith θ", "green")
    sheet.gap(50)
    sheet.note("graphs of their own: W visits each alone", bold=True)
    sheet.note(
        "Split's backward asks the layer's graph for ∂x only, and notes (y, ∂y, θ). W later asks "
        "for ∂θ only. Nothing is done twice."
    )
