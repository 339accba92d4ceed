"""Diagrams of phase 2: attention shared out over ranks."""

from __future__ import annotations

from collections.abc import Callable

from solutions.phase2_advanced.context_parallel import own_positions, visible

from .letters import SMALL
from .registry import diagram
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
    for index, (name, place) in enumerate(ways):
        owner, seen = place()
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
