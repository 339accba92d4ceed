"""``distlab plan``: the table of layouts that no other beats, as a file, and the best timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..hardware.failures import observed, young
from ..picture import chrome_trace, draw
from .job import Job
from .layouts import plan_of
from .lines import run
from .report import not_modelled
from .search import USABLE, Found, Operation, Row, pareto, search

PICTURED = 4  # layers of a picture without a pipeline
ROUNDS = 2  # micro-batches per stage in a picture


def answer(
    jobs: Sequence[tuple[Job, Operation]], top: int, price: float, folder: Path, out: Console
) -> list[Row]:
    """Search for each number of GPUs, print the table, draw the winner; returns all rows."""
    torch.set_num_threads(1)
    found = []
    for job, operation in jobs:
        with out.status(f"searching layouts of {job.gpus} GPUs") as status:
            found.append(search(job, operation, top, lambda text: status.update(text)))
    rows = [row for each in found for row in each.rows]
    out.print(table(rows, price))
    for line in remarks(jobs, found):
        out.print(Text(line, "yellow"), soft_wrap=True)
    best = min((each.best for each in found), key=lambda row: row.days)
    for path in picture(best, folder):
        out.print(str(path), highlight=False, soft_wrap=True)
    return rows


def table(rows: Sequence[Row], price: float) -> Table:
    """The rows that no other beats."""
    job = rows[0].job
    counts = ", ".join(map(str, dict.fromkeys(row.layout.gpus for row in rows)))
    shown = Table(
        title=f"{job.model}, {short(job.tokens)} tokens in steps of {job.sequences} sequences of "
        f"{job.each:,}, on {counts} GPUs of {job.cluster}",
        box=None,
        title_justify="left",
        header_style="dim",
        pad_edge=False,
    )
    shown.add_column("layout, micro-batch x number, recomputed")
    heads = ["days", "error", "GPU hours", *["cost"] * (price > 0), "left/GPU", "goodput"]
    several = len({row.layout.gpus for row in rows}) > 1
    for head in (*["GPUs"] * several, *heads, "simulated"):
        shown.add_column(head, justify="right")
    for row in pareto(rows):
        shown.add_row(*cells(row, price, several), style="" if row.simulated else "dim")
    return shown


def short(number: float) -> str:
    """1e12, not 1e+12."""
    mantissa, _, exponent = f"{number:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def cells(row: Row, price: float, several: bool) -> list[str]:
    """A row of the table."""
    layout = row.layout
    return [
        f"{layout.how}, {layout.batch} x {layout.micro_batches}, {layout.recompute}",
        *([f"{layout.gpus:,}"] if several else []),
        f"{row.days:,.1f}",
        "unknown" if row.error is None else f"±{row.error:.0%}",
        f"{row.hours:,.0f}",
        *([f"{row.hours * price:,.0f}"] if price else []),
        f"{row.left / 1e9:,.0f} GB",
        f"{row.goodput:.1%}",
        "yes" if row.simulated else "formula",
    ]


def remarks(jobs: Sequence[tuple[Job, Operation]], found: Sequence[Found]) -> list[str]:
    """Notes that a reader of these numbers needs."""
    lines = []
    for (job, operation), each in zip(jobs, found, strict=True):
        done = sum(row.simulated for row in each.rows)
        lines.append(
            f"{job.gpus} GPUs: {each.layouts:,} layouts; {each.too_large:,} leave less than "
            f"{1 - USABLE:.0%} of the memory free; {done} simulated"
        )
        lines.append(f"{job.gpus} GPUs: {lost(job, operation)}")
    shown = pareto([row for each in found for row in each.rows])
    for told in dict.fromkeys((row.error, row.told) for row in shown):
        share = "unknown" if told[0] is None else f"±{told[0]:.0%}"
        lines.append(f"{share}: {told[1]}")
    best = min((each.best for each in found), key=lambda row: row.days)
    missing = [what for what in not_modelled(plan_of(best.job, best.layout)) if what != "failures"]
    return [*lines, f"not modelled: {', '.join(missing)}"]


def lost(job: Job, run: Operation) -> str:
    """Where the time goes that makes no progress."""
    saving, between = run.saving(job), run.between(job)
    seen = observed(job.machine.gpu.name)
    usual = f" ({seen.system}, {seen.gpu}: {seen.source})" if run.hours == seen.hours else ""
    return (
        f"one GPU fails every {run.hours:,.0f} h{usual}. The job fails every "
        f"{between / 3600:,.1f} h. A checkpoint takes {saving:,.0f} s, and is due every "
        f"{run.interval(job) / 60:,.0f} minutes (Daly; Young: "
        f"{young(saving, between) / 60:,.0f}). A restart takes {run.restart:,.0f} s"
    )


def picture(row: Row, folder: Path) -> list[Path]:
    """The timeline of the layout with few layers and micro-batches."""
    plan = plan_of(row.job, row.layout)
    if plan.pipeline > 1:
        few = ROUNDS * plan.pipeline
        layers = plan.pipeline * plan.chunks
        copy_batch = plan.samples // plan.micro_batches * few
        plan = replace(plan, layers=layers, micro_batches=few, copy_batch=copy_batch)
        plan = replace(plan, gpus=(plan.model_ranks,))
    else:
        layers = min(PICTURED, plan.spec.layers)
        plan = replace(plan, layers=layers, accumulate=min(plan.accumulate, ROUNDS))
    seen = run(plan).spans
    if plan.model_ranks == 1:
        seen = [span for span in seen if span.rank == 0]  # all ranks do the same
    title = f"{row.job.model}, {row.layout.how}: {layers} of {row.job.spec.layers} layers"
    name = f"{row.job.model}-{row.layout.how}-{row.job.cluster}".replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        draw(seen, folder / f"{name}-timeline.png", title),
        chrome_trace(seen, folder / f"{name}-timeline.json"),
    ]


def plain(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    return {
        **asdict(row.layout),
        "layout": row.layout.how,
        "simulated": row.simulated,
        "why_not": row.layout.not_simulated,
        "days": row.days,
        "gpu_hours": row.hours,
        "memory": row.memory,
        "memory_left": row.left,
        "error": row.error,
        "error_from": row.told,
        "goodput": row.goodput,
        "step": row.step,
        "tokens_per_second": row.rate,
    }


def write(rows: Sequence[Row], price: float, path: Path) -> None:
    """All rows as JSON; ``shown``: whether no other beats it."""
    shown = {id(row) for row in pareto(rows)}
    entries = [plain(row) | {"shown": id(row) in shown} for row in rows]
    for entry in entries if price else ():
        entry["cost"] = entry["gpu_hours"] * price
    job = {name: value for name, value in asdict(rows[0].job).items() if name != "gpus"}
    job |= {"sequences": rows[0].job.sequences, "length": rows[0].job.each}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"job": job, "rows": entries}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
