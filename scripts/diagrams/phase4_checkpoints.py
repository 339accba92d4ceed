"""Diagrams of phase 4: checkpoints, exact resume, other world sizes."""

from __future__ import annotations

import numpy as np

from solutions.phase4_production.elastic import chunk_of
from solutions.phase4_production.elastic_sampler import loss_weight

from .registry import diagram
from .shapes import Cell, row
from .sheet import INNER, MARGIN, RANKS, WIDTH, Sheet
from .times import Bar, lanes


@diagram("4.1", "A reader never looks where a writer writes")
def survive(sheet: Sheet) -> None:
    steps = [
        ("make\n.partial/", "grey"),
        ("files,\nflush", "blue"),
        ("manifest,\nflush", "blue"),
        ("rename,\nflush", "orange"),
        ("MARKER,\nflush", "green"),
        ("delete\nold", "grey"),
    ]
    w = INNER / len(steps)
    row(
        sheet,
        "",
        [Cell(words, tone, tone == "green") for words, tone in steps],
        x=MARGIN,
        w=w,
        h=46,
    )
    counts = [Cell("killed here: the checkpoint before counts", "plain", dashed=True, wide=4.5)]
    counts.append(Cell("this one counts", "green", True, wide=1.5))
    row(sheet, "", counts, x=MARGIN, w=w, h=30)
    sheet.note(
        "Time to the right. The folder is filled under another name, 000007-step-120.partial. "
        "Each rename is done or not done, never half. The marker is written aside and renamed: "
        "from that moment the new checkpoint counts."
    )


@diagram("4.15", "All ranks come to each all-gather, also one that failed")
def together(sheet: Sheet) -> None:
    work, gather = 1.2, 1.05
    rows: dict[str, list[Bar]] = {"rank 0": [], "others": []}
    now, gathers = 0.0, []
    for words, everyone in (
        ("make\nfolder", False),
        ("files", True),
        ("finish", False),
        ("delete\nold", False),
    ):
        rows["rank 0"].append(Bar(now, now + work, words, "blue"))
        if everyone:
            rows["others"].append(Bar(now, now + work, words, "green"))
        now += work
        gathers.append(now)
        now += gather
    where = lanes(sheet, rows, now, h=40, apart=14)
    for number, start in enumerate(gathers):
        x1, x2 = where.x(start + 0.05), where.x(start + gather - 0.05)
        sheet.box(
            x1,
            where.top - 2,
            x2 - x1,
            where.bottom - where.top + 4,
            f"{number + 1}\nall-\ngather",
            "orange",
            strong=True,
        )
    sheet.gap(4)
    sheet.note(
        "Each all-gather carries results, or what failed: 1 the folder's name, 2 the files' "
        "hashes, 3 that the checkpoint is complete, 4 that old ones are gone. If any rank "
        "failed, all raise the same sentence."
    )


def numbers(key: tuple[int, ...], count: int) -> list[int]:
    """The first numbers below 100 of a stream."""
    words = np.random.SeedSequence(7, spawn_key=key).generate_state(count)
    return (words % 100).tolist()


@diagram("4.16", "A key (seed, epoch, i) gives a sample the same numbers")
def keys(sheet: Sheet) -> None:
    samples, first, workers = range(4, 10), 4, 2
    x, w = MARGIN + 180, 58
    streams = [numbers((worker,), 8) for worker in range(workers)]
    run = [streams[i % workers][i // workers] for i in samples]
    resumed = [streams[(i - first) % workers][(i - first) // workers] for i in samples]
    keyed = [numbers((0, 0, i), 1)[0] for i in samples]
    row(sheet, "sample", [Cell(str(i), "plain", bold=True) for i in samples], x=x, w=w)
    row(sheet, "worker's stream: run", [Cell(str(n), "blue") for n in run], x=x, w=w)
    other = [
        Cell(str(n), "blue" if n == m else "red", n != m) for n, m in zip(resumed, run, strict=True)
    ]
    row(sheet, "resumed at 4", other, x=x, w=w, below=14)
    row(sheet, "key: run", [Cell(str(n), "green") for n in keyed], x=x, w=w)
    row(sheet, "resumed at 4", [Cell(str(n), "green") for n in keyed], x=x, w=w)
    sheet.note(
        "Numbers that samples 4 to 9 draw. From a worker's stream they depend on the samples "
        "that it has loaded before; bold: other ones than in the run. From a key they are the "
        "same, no matter which worker loads the sample, and when."
    )


@diagram("4.2", "Save all that the next step reads")
def resume(sheet: Sheet) -> None:
    w = INNER / 2
    row(
        sheet,
        "",
        [
            Cell("shared: rank 0 writes", "plain", bold=True),
            Cell("own: every rank writes", "plain", bold=True),
        ],
        x=MARGIN,
        w=w,
    )
    for left, right in (
        ("model, optimizer,\nschedule, scaler", "sampler: epoch, seed,\nsamples consumed"),
        ("position: step,\nepoch, batch", "streams: torch, CUDA,\nnumpy, random"),
        ("", 'shards, if any: own=["optimizer"]'),
    ):
        row(
            sheet,
            "",
            [Cell(left, "blue") if left else None, Cell(right, "orange")],
            x=MARGIN,
            w=w,
            h=44 if left else 30,
        )
    sheet.gap(8)
    trained, ahead, later = 5, 2 * 2, 3
    cells = [Cell(str(k), "green") for k in range(trained)]
    cells += [Cell(str(k), "grey", dashed=True) for k in range(trained, trained + ahead)]
    cells += [Cell("", "plain") for _ in range(later)]
    row(sheet, "batches", cells, w=36)
    marks = [
        Cell(f"trained on: position {trained}", "green", wide=trained),
        Cell("handed out", "grey", dashed=True, wide=ahead),
    ]
    row(sheet, "", marks, w=36)
    sheet.note(
        f"2 workers that prefetch 2 batches each are {ahead} batches ahead. The position counts "
        "batches that were trained on."
    )


@diagram("4.3", "Training waits for the copy only, the disk works beside it")
def background(sheet: Sheet) -> None:
    step, copy, write, first, every = 1.0, 0.8, 5.0, 8, 4
    training: list[Bar] = []
    writer: list[Bar] = []
    now, free, end = 0.0, 0.0, 9.2
    for number in range(first, first + every + 2):
        training.append(
            Bar(now, now + step, f"{'step ' if number == first else ''}{number}", "blue")
        )
        now += step
        if number % every == 0:
            if free > now:
                training.append(Bar(now, free, "wait", "red", dashed=True))
                now = free
            training.append(Bar(now, now + copy, "copy", "orange", strong=True))
            now += copy
            free = now + write
            words = "hash, write, flush, rename, MARKER" if free < end else "hash, …"
            writer.append(Bar(now, min(free, end), words, "green"))
    holds = [
        Bar(
            bar.start,
            bar.end,
            f"all of step {first + every * k}" if not k else f"step {first + every}",
            "purple",
        )
        for k, bar in enumerate(writer)
    ]
    lanes(sheet, {"training": training, "writer": writer, "snapshot": holds}, end)
    sheet.gap(4)
    sheet.note(
        f"A save every {every} steps. The snapshot is not changed while the writer reads it. "
        "Saves that come faster than the disk takes them wait for the one before."
    )


@diagram("4.18", "Form the batch first, then deal it out to any number of ranks")
def elastic_batches(sheet: Sheet) -> None:
    order, size = [7, 2, 9, 4, 0, 5, 1, 8, 3, 6, 11, 10], 6
    w = 37
    row(sheet, "order", [Cell(str(i), "grey") for i in order], w=w)
    row(
        sheet,
        "",
        [Cell(f"batch {k}", "plain", strong=True, wide=size) for k in range(2)],
        w=w,
        below=12,
    )
    for batch, ranks in enumerate((4, 3)):
        mine = order[batch * size : (batch + 1) * size]
        spread: list[Cell | None] = [None] * (batch * size)
        spread += [Cell(str(i), RANKS[k % ranks]) for k, i in enumerate(mine)]
        row(sheet, f"{ranks} ranks", spread, w=w, below=3)
        dealt: list[Cell | None] = [None] * (batch * size)
        dealt += [Cell(f"r{k % ranks}", RANKS[k % ranks]) for k in range(size)]
        row(sheet, "", dealt, w=w, below=12)
    counts = [len(order[:size][r::4]) for r in range(4)]
    weights = [loss_weight(n, size, 4) for n in counts]
    sheet.note(
        f"B = {size}, drawn from (seed, epoch) alone. After batch 0 position {size} is saved: "
        f"samples of all ranks. Four ranks have {', '.join(map(str, counts))} samples, so their "
        f"losses weigh n·W/B = {weights[0]:.2f} or {weights[-1]:.2f}."
    )


@diagram("4.4", "Shards without padding can be cut anew for any world size")
def recut(sheet: Sheet) -> None:
    count, old, new = 11, 4, 3
    left = MARGIN + 96
    w = (WIDTH - MARGIN - left) / count

    def tone(position: int) -> str:
        return RANKS[next(r for r in range(old) if position in chunk_of(count, old, r))]

    row(sheet, "momentum", [Cell(str(k), tone(k)) for k in range(count)], x=left, w=w)
    for ranks, words in ((old, f"saved by {old}"), (new, f"read by {new}")):
        cells = []
        for rank in range(ranks):
            mine = chunk_of(count, ranks, rank)
            fill = RANKS[rank] if ranks == old else "plain"
            cells.append(Cell(f"r{rank}: {mine[0]}–{mine[-1]}", fill, ranks == new, wide=len(mine)))
        row(sheet, words, cells, x=left, w=w, below=12 if ranks == old else 5)
    for rank in range(new):
        mine = chunk_of(count, new, rank)
        files = [r for r in range(old) if set(mine) & set(chunk_of(count, old, r))]
        words = "shards " + " and ".join(map(str, files))
        sheet.note(f"Rank {rank} of {new} reads elements {mine[0]}–{mine[-1]}: {words}.")
