"""``docs/plan.md``: tables of ``distlab plan``, and exercise 3.21's choices beside them.

``python -m benchmarks.plan_page`` searches for every training that is not recorded yet, keeps the
rows in ``docs/plan/``, and writes the page from them. ``--page`` only writes the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from distlab.course.catalogue import root
from distlab.hardware.clusters import load_cluster
from distlab.hardware.failures import all_observed
from distlab.simulate.job import Job
from distlab.simulate.search import USABLE, operation
from distlab.simulate.search_report import answer, lost, short, write

from .common import Table
from .plan_words import ABOUT, CHOICES, GOODPUT
from .scaling_choice import choice_of, profile_of

FOLDER, PAGE = root() / "docs" / "plan", root() / "docs" / "plan.md"
CLUSTER = "dgx-h100"
ASKED = ((512, "llama-70b", 1e12), (64, "gpt-7b", 3e11))

Entry = dict[str, Any]


def job_of(gpus: int, model: str, tokens: float) -> Job:
    """A training of the page."""
    return Job(model=model, cluster=CLUSTER, gpus=gpus, tokens=tokens)


def file_of(gpus: int, model: str) -> Path:
    """Where its rows are recorded."""
    return FOLDER / f"{model}-{gpus}.json"


def record(top: int) -> None:
    """Search for what is not recorded."""
    for gpus, model, tokens in ASKED:
        if not file_of(gpus, model).exists():
            job = job_of(gpus, model, tokens)
            rows = answer([(job, operation(job))], top, 0.0, FOLDER, Console())
            write(rows, 0.0, file_of(gpus, model))


def entries(gpus: int, model: str) -> list[Entry]:
    """The recorded rows."""
    found: list[Entry] = json.loads(file_of(gpus, model).read_text(encoding="utf-8"))["rows"]
    return sorted(found, key=lambda entry: entry["days"])


def shown(gpus: int, model: str, tokens: float) -> Table:
    """The rows that no other beats, and all that were simulated."""
    rows = [
        [
            entry["layout"],
            f"{entry['batch']} x {entry['micro_batches']}",
            entry["recompute"],
            f"{entry['days']:,.1f}",
            "unknown" if entry["error"] is None else f"±{entry['error']:.0%}",
            f"{entry['gpu_hours']:,.0f}",
            f"{entry['memory_left'] / 1e9:,.0f} GB",
            f"{entry['goodput']:.1%}",
            "yes" if entry["simulated"] else "formula",
            "" if entry["shown"] else "beaten",
        ]
        for entry in entries(gpus, model)
        if entry["shown"] or entry["simulated"]
    ]
    head = ["layout", "micro-batch", "recompute", "days", "error", "GPU hours", "left per GPU"]
    title = f"{model}, {short(tokens)} tokens, {gpus} GPUs"
    job = job_of(gpus, model, tokens)
    said = lost(job, operation(job))
    note = f"{said[0].upper()}{said[1:]}."
    return Table(title, [*head, "goodput", "simulated", ""], rows, note)


def compared() -> Table:
    """3.21's choice, and the fastest simulated row without tensor and pipeline parallelism."""
    rows = []
    for gpus, model, _ in ASKED:
        alone = [
            entry
            for entry in entries(gpus, model)
            if entry["simulated"] and entry["tensor"] == entry["pipeline"] == 1
        ]
        fast: dict[str, Entry] = {}
        for entry in alone:
            fast.setdefault(entry["strategy"], entry)
        cluster = load_cluster(CLUSTER)
        chosen = choice_of(profile_of(model), cluster, gpus, USABLE * cluster.gpu.memory)
        best = alone[0]
        cost = "not among the simulated rows"
        if chosen in fast:
            cost = f"{fast[chosen]['days'] / best['days'] - 1:+.1%} time"
        rows.append([model, str(gpus), chosen, best["layout"], best["recompute"], cost])
    head = ["model", "GPUs", "3.21 chooses", "plan's fastest", "recompute", "3.21's against it"]
    return Table("Exercise 3.21 beside it", head, rows, CHOICES)


def failures() -> Table:
    """The observed failures."""
    rows = [
        [
            row.system,
            row.gpu,
            f"{row.gpus:,}",
            f"{row.days:g}",
            str(row.interruptions),
            f"{row.hours:,.0f} h",
            row.source,
        ]
        for row in all_observed()
    ]
    head = ["job", "GPU", "GPUs", "days", "interruptions", "one GPU fails every", "source"]
    return Table("Failures and checkpoints", head, rows, GOODPUT)


def write_page() -> Path:
    """Write the page from the records."""
    tables = [shown(*asked) for asked in ASKED]
    drawn = [
        f"![One step of {path.stem.removesuffix('-timeline')}](plan/{path.name})"
        for path in sorted(FOLDER.glob("*-timeline.png"), reverse=True)
    ]
    parts = [ABOUT, *(table.markdown() for table in tables), *drawn]
    parts += [compared().markdown(), failures().markdown()]
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return PAGE


def main() -> None:
    """Record, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="only the page")
    parser.add_argument("--top", type=int, default=8, help="layouts that are simulated")
    options = parser.parse_args()
    if not options.page:
        record(options.top)
    print(write_page())


if __name__ == "__main__":
    main()
