"""Diagrams of phase 3: rings, trees, halving and doubling, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from solutions.phase1_data_parallel.simple_allreduce import communication_cost
from solutions.phase3_multi_node.allreduce_choice import LINKS, PATTERNS, choose, predict
from solutions.phase3_multi_node.ring_allreduce import all_gather_steps, reduce_scatter_steps
from solutions.phase3_multi_node.tree_allreduce import tree_links

from .letters import SMALL
from .plots import axes
from .registry import diagram
from .shapes import Cell
from .sheet import INNER, MARGIN, Sheet
from .times import Bar, Message, ladder, lanes

LEFT = 58  # room for "rank 0"


def panels(sheet: Sheet, heads: Sequence[str], grids: Sequence[Sequence[Sequence[Cell]]]) -> None:
    """Grids side by side, a row per rank: one moment after another."""
    ranks, chunks = len(grids[0]), len(grids[0][0])
    room = (INNER - LEFT) / len(grids)
    w = min((room - 14) / chunks, 38)
    for index, head in enumerate(heads):
        middle = MARGIN + LEFT + index * room + chunks * w / 2
        sheet.text(middle, sheet.y + 8, head, anchor="middle", size=SMALL)
    sheet.gap(22)
    for rank in range(ranks):
        sheet.text(MARGIN, sheet.y + 13, f"rank {rank}")
        for index, grid in enumerate(grids):
            for chunk, cell in enumerate(grid[rank]):
                x = MARGIN + LEFT + index * room + chunk * w
                sheet.box(
                    x,
                    sheet.y,
                    w - 3,
                    26,
                    cell.text,
                    cell.tone,
                    strong=cell.strong,
                    dashed=cell.dashed,
                )
        sheet.gap(31)
    sheet.gap(4)


@diagram("3.1", "Partial sums of all chunks travel at once, one rank apart")
def reduce_scatter(sheet: Sheet) -> None:
    ranks = 4
    parts = [[1] * ranks for _ in range(ranks)]
    grids = []
    for step in range(ranks):
        sends = [
            reduce_scatter_steps(r, ranks)[step][0] if step < ranks - 1 else -1
            for r in range(ranks)
        ]
        grids.append(
            [
                [
                    Cell(
                        f"►{n}" if c == sends[r] else str(n),
                        "green" if n == ranks else "orange" if c == sends[r] else "grey",
                        c == sends[r] or n == ranks,
                    )
                    for c, n in enumerate(parts[r])
                ]
                for r in range(ranks)
            ]
        )
        moving = [parts[r][chunk] for r, chunk in enumerate(sends)]
        for r, chunk in enumerate(sends if step < ranks - 1 else []):
            parts[(r + 1) % ranks][chunk] += moving[r]
    panels(sheet, ["start", *(f"after step {k}" for k in range(1, ranks))], grids)
    sheet.note(
        f"W = {ranks}; a column is a chunk. The number says how many ranks' parts are in it; ► "
        f"goes to the right neighbour next. After W-1 = {ranks - 1} steps rank r has chunk r "
        "complete."
    )


@diagram("3.2", "The same walk without adding: complete chunks go round")
def all_gather(sheet: Sheet) -> None:
    ranks = 4
    have = [{r} for r in range(ranks)]
    grids = []
    for step in range(ranks):
        sends = [
            all_gather_steps(r, ranks)[step][0] if step < ranks - 1 else -1 for r in range(ranks)
        ]
        grids.append(
            [
                [
                    Cell(
                        f"►{c}" if c == sends[r] else str(c),
                        "orange" if c == sends[r] else "green",
                        c == sends[r],
                    )
                    if c in have[r]
                    else Cell("", "plain", dashed=True)
                    for c in range(ranks)
                ]
                for r in range(ranks)
            ]
        )
        for r, chunk in enumerate(sends if step < ranks - 1 else []):
            have[(r + 1) % ranks].add(chunk)
    panels(sheet, ["start", *(f"after step {k}" for k in range(1, ranks))], grids)
    sheet.note(
        "Rank r begins with its own chunk r. What it receives in one step it sends (►) in the "
        "next. Each chunk is received where it belongs."
    )


@diagram("3.3", "Reduce-scatter, then all-gather: less than 2N bytes for any W")
def ring(sheet: Sheet) -> None:
    ranks = 4
    done = [Cell("Σ", "green", True)] * ranks
    empty = Cell("", "plain", dashed=True)
    grids = [
        [[Cell(f"{r}", "grey")] * ranks for r in range(ranks)],
        [
            [Cell("Σ", "green", True) if c == r else empty for c in range(ranks)]
            for r in range(ranks)
        ],
        [done for _ in range(ranks)],
    ]
    panels(sheet, ["own parts", "reduce-scatter", "all-gather"], grids)
    sheet.note("A number is the part of that rank, Σ the sum of all ranks' parts.")
    most = 16
    plot = axes(sheet, (2, most), (0, 6), height=130, right=130)
    plot.frame(
        {w: str(w) for w in (2, 4, 8, 12, 16)}, {n: f"{n} N" for n in (0, 2, 4, 6)}, "ranks W",
        "bytes that the busiest rank sends",
    )  # fmt: skip
    for name, tone, last in (("root", "red", 7), ("ring", "blue", most)):
        points = [
            (w, communication_cost(name, w, 1).max_bytes_per_rank) for w in range(2, last + 1)
        ]
        plot.line(points, tone)
        plot.word(
            *points[-1],
            f"{name}: {'(W-1)·N' if name == 'root' else '2(W-1)/W·N'}",
            tone,
            up=-2 if name == "ring" else -8,
        )
    plot.line([(2, 2), (most, 2)], "grey", dashed=True, k=False)


def segmented(count: int, chunks: int, send: float, add: float) -> tuple[list[Bar], list[Bar]]:
    """The link and the processor of a rank; a hop sends what the hop ``count`` before brought."""
    link: list[Bar] = []
    adding: list[Bar] = []
    for hop in range(chunks * count):
        start = link[-1].end if link else 0.0
        for before in {hop - count, hop - 2 if count > 1 else hop - 1}:
            start = max(start, adding[before].end if before >= 0 else 0.0)
        name = f"{hop % count + 1}" if count > 1 else "send"
        link.append(Bar(start, start + send / count, name, "blue"))
        begin = max(link[-1].end, adding[-1].end if adding else 0.0)
        adding.append(Bar(begin, begin + add / count, name if count > 1 else "add", "orange"))
    return link, adding


@diagram("3.4", "Small segments: one travels while another one is added")
def segments(sheet: Sheet) -> None:
    chunks, send, add = 3, 4.0, 3.0
    plain = segmented(1, chunks, send, add)
    cut = segmented(4, chunks, send, add)
    span = plain[1][-1].end
    for words, (link, adding) in (("plain ring", plain), ("segments, S = 4", cut)):
        sheet.note(f"{words}: the last addition ends after {adding[-1].end:g}", bold=True)
        lanes(sheet, {"link": link, "addition": adding}, span, label=84)
        sheet.gap(8)
    sheet.note(
        f"{chunks} steps of one rank, in units in which a chunk travels for {send:g} and is added "
        f"in {add:g}. Dashed: nothing to do. Two segments are under way at a time."
    )


@diagram("3.5", "In round k the numbers whose lowest bit is bit k hand over")
def tree(sheet: Sheet) -> None:
    ranks = 6
    rounds = (ranks - 1).bit_length()
    messages = []
    for rank in range(1, ranks):
        parent = tree_links(rank, 0, ranks)[0]
        assert parent is not None
        turn = (rank & -rank).bit_length() - 1
        messages.append(Message(turn, rank, parent, tone="blue"))
        messages.append(Message(2 * rounds - 1 - turn, parent, rank, tone="green"))
    names = [f"{rank} = {rank:0{rounds}b}" for rank in range(ranks)]
    where = ladder(sheet, names, messages, 2 * rounds, apart=32)
    middle = where.x(rounds) - 6
    sheet.path([(middle, where.top), (middle, where.bottom)], "grey", dashed=True)
    for turn in range(2 * rounds):
        number = turn if turn < rounds else 2 * rounds - 1 - turn
        sheet.text(where.x(turn + 0.4), sheet.y + 8, f"bit {number}", anchor="middle", size=SMALL)
    sheet.gap(20)
    for turn, words in ((0, "reduce to root 0"), (rounds, "broadcast, far children first")):
        sheet.text(
            where.x(turn + rounds / 2) - 6,
            sheet.y + 8,
            words,
            anchor="middle",
            size=SMALL,
            bold=True,
        )
    sheet.gap(24)
    sheet.note(
        f"W = {ranks}: {ranks - 1} messages and ⌈log₂ W⌉ = {rounds} rounds each way. A parent is "
        "the number without its lowest bit. The broadcast uses the same links backwards."
    )


@diagram("3.6", "Partners halve the work, then tell each other the results")
def halving(sheet: Sheet) -> None:
    ranks, width = 4, 84.0
    distances = [1 << k for k in reversed(range(ranks.bit_length() - 1))]
    pieces = [(0.0, 1.0)] * ranks
    moments: list[list[tuple[float, float]]] = [pieces]
    for distance in distances:
        pieces = [
            (
                low + (high - low) / 2 * bool(r & distance),
                high - (high - low) / 2 * (not r & distance),
            )
            for r, (low, high) in enumerate(pieces)
        ]
        moments.append(pieces)
    moments += moments[-2::-1]
    heads = [
        "start",
        *(f"halve: {d}" for d in distances),
        *(f"double: {d}" for d in reversed(distances)),
    ]
    room = (INNER - LEFT) / len(moments)
    for index, head in enumerate(heads):
        sheet.text(
            MARGIN + LEFT + index * room + width / 2, sheet.y + 8, head, anchor="middle", size=SMALL
        )
    sheet.gap(22)
    for rank in range(ranks):
        sheet.text(MARGIN, sheet.y + 13, f"rank {rank}")
        for index, moment in enumerate(moments):
            x, (low, high) = MARGIN + LEFT + index * room, moment[rank]
            sheet.box(x, sheet.y, width, 26, "", "plain", dashed=True)
            parts = 1 << min(index, len(distances))
            tone = "green" if parts == ranks else "blue"
            words = "Σ" if parts == ranks else str(parts)
            sheet.box(x + low * width, sheet.y, (high - low) * width, 26, words, tone)
        sheet.gap(31)
    sheet.gap(4)
    sheet.note(
        "The head says the partner's distance: rank ^ distance. A bar is the part of the tensor "
        "that a rank is responsible for, the number says how many ranks' parts are in it, Σ: all "
        "of them."
    )


@diagram("3.29", "Few messages for small tensors, few bytes for large ones")
def choice(sheet: Sheet) -> None:
    ranks, low, high = 4, 1e3, 1e8
    sizes = [low * 10 ** (k / 10) for k in range(51)]
    plot = axes(sheet, (low, high), (2e-4, 0.4), height=200, right=120, log_x=True, log_y=True)
    plot.frame(
        {1e3: "1 kB", 1e4: "10 kB", 1e5: "100 kB", 1e6: "1 MB", 1e7: "10 MB", 1e8: "100 MB"},
        {1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms"},
        "size of the tensor",
        "time of an all-reduce",
    )
    tones = dict(zip(PATTERNS, ("orange", "green", "blue"), strict=True))
    ups = dict(zip(PATTERNS, (12, -2, -14), strict=True))
    for name in PATTERNS:
        points = [(n, predict(name, ranks, int(n), LINKS)) for n in sizes]
        plot.line(points, tones[name], dashed=name == "tree")
        plot.word(*points[-1], f"{name.replace('_', ', ')}", tones[name], up=ups[name])
    borders = [
        n for before, n in pairwise(sizes)
        if choose(ranks, int(before), LINKS) != choose(ranks, int(n), LINKS)
    ]  # fmt: skip
    for border in borders:
        plot.line([(border, 2e-4), (border, 0.4)], "grey", dashed=True, k=False)
    for left, right in zip([low, *borders], [*borders, high], strict=True):
        best = choose(ranks, int((left * right) ** 0.5), LINKS)
        words = {"tree": "tree", "halving_doubling": "halving", "ring": "ring"}[best]
        plot.word((left * right) ** 0.5, 0.25, words, tones[best], anchor="middle")
    sheet.note(
        f"W = {ranks}, with α and β of each pattern as fitted on one machine (gloo, 2 cores). The "
        "word on top names the fastest. Fit your own: the borders move."
    )
