"""``distlab simulate``: the scaling table with progress, as CSV and JSON, and as a picture."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..hardware.clusters import load_cluster
from ..picture import chrome_trace, draw
from ..ranks.results import RankFailure
from .plan import Plan
from .prediction import Answer, simulate

LONG = 120.0  # real seconds that are worth a word beforehand
PICTURED_GPUS = 16  # the timeline shows the largest run of at most so many


def load_plan(config: Path | None, given: dict[str, Any]) -> Plan:
    """A plan from a YAML file, overridden by what the command line gives.

    Raises ValueError for a field that is unknown or wrong.
    """
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{config} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{config}: expected lines like `model: resnet50`")
    known = {f.name for f in fields(Plan)}
    wrong = set(values) - known
    if wrong:
        raise ValueError(f"{config}: unknown {', '.join(sorted(wrong))}; known: {', '.join(known)}")
    values |= {k: v for k, v in given.items() if v is not None}
    if "gpus" in values:
        values["gpus"] = tuple(dict.fromkeys(map(int, values["gpus"])))
    if "fused" in values:  # YAML may name one without a list
        named = values["fused"]
        values["fused"] = (named,) if isinstance(named, str) else tuple(named)
    return Plan(**values)


def run(plan: Plan, folder: Path, out: Console) -> int:
    """Simulate, print the table, write ``folder``'s files; returns the exit status."""
    torch.set_num_threads(1)
    answers: list[Answer] = []
    columns = [*Progress.get_default_columns()]
    try:
        with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
            task = bar.add_task("simulating", total=sum(plan.gpus))
            begun = time.monotonic()
            for answer in simulate(plan):
                answers.append(answer)
                bar.advance(task, answer.gpus)
                took, begun = time.monotonic() - begun, time.monotonic()
                for line in _forecast(plan, answers, took):
                    bar.console.print(Text(line, "yellow"), soft_wrap=True)
    except RankFailure as failure:
        if answers and failure.kind == "hang":  # finished rows are worth showing
            return _finish(plan, answers, folder, out)
        where = f"\n  line: {failure.line}" if failure.line else ""
        raise ValueError(f"the simulated run failed: {failure.message}{where}") from None
    return _finish(plan, answers, folder, out)


def _forecast(plan: Plan, answers: Sequence[Answer], took: float) -> list[str]:
    """A warning if the next number of GPUs will take long, judged from the seconds of the last."""
    following = plan.gpus[len(answers) :][:1] if plan.every_rank or not plan.folds else ()
    more = [took * gpus / answers[-1].gpus for gpus in following]
    return [
        f"{following[0]} GPUs take {seconds / 60:.0f} minutes here or longer: {_faster(plan)}"
        for seconds in more
        if seconds > LONG
    ]


def _faster(plan: Plan) -> str:
    """A way to make a simulation faster."""
    if plan.folds:
        again = "without --every-rank one GPU runs for all that do the same"
        return again if plan.every_rank else "nothing but patience helps"
    return "every rank must run, and each of its messages; a larger --bucket-mb has fewer"


def _finish(plan: Plan, answers: list[Answer], folder: Path, out: Console) -> int:
    """Print the table and write the files; returns the exit status."""
    out.print(_table(plan, answers))
    for line in _remarks(plan, answers):
        out.print(Text(line, "yellow"), soft_wrap=True)
    for path in write(plan, answers, folder):
        out.print(str(path), highlight=False, soft_wrap=True)
    return 0


def _table(plan: Plan, answers: Sequence[Answer]) -> Table:
    spec = plan.spec
    table = Table(
        title=f"{plan.model}, {plan.how} by {plan.impl}, on {plan.cluster}: "
        f"{plan.batch or spec.batch} samples per GPU, "
        f"{plan.arithmetic}{', fp8 in the blocks' if plan.fp8 else ''}",
        box=None,
        title_justify="left",
        header_style="dim",
        pad_edge=False,
    )
    heads = (
        "GPUs", "step", f"{spec.unit}/s", "error", "efficiency", "waits for comm.", "hidden comm.",
        "memory/GPU", "MFU", *(["bubble"] if plan.pipeline > 1 else []),
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for a in answers:
        table.add_row(
            str(a.gpus),
            f"{a.step * 1e3:,.2f} ms",
            f"{a.rate:,.0f}",
            "unknown" if a.likely.share is None else f"±{a.likely.share:.0%}",
            f"{a.efficiency:.1%}",
            f"{a.communication_share:.1%}",
            f"{a.hidden * 1e3:,.2f} ms",
            Text(f"{a.memory / 1e9:,.1f} GB", "" if a.fits else "bold red"),
            f"{a.mfu:.1%}",
            *([f"{a.bubble:.1%}"] if plan.pipeline > 1 else []),
        )
    return table


def _remarks(plan: Plan, answers: Sequence[Answer]) -> list[str]:
    """Notes that a reader of these numbers needs."""
    remarks = []
    too_big = [str(a.gpus) for a in answers if not a.fits]
    if too_big:
        remarks.append(f"does not fit into a GPU's memory with {', '.join(too_big)} GPUs")
    missing = plan.gpus[len(answers) :]
    if missing:
        remarks.append(
            f"{missing[0]} GPUs were not done here in {plan.timeout:,.0f} s (`timeout` in a "
            f"--config file gives them longer; {_faster(plan)})"
        )
    dtype = plan.arithmetic
    gpu = load_cluster(plan.cluster).gpu
    if dtype not in gpu.flops:
        remarks.append(f"{gpu.name} has no rate for {dtype}: float32's is taken")
    names = {name for a in answers for name in a.unmodelled}
    if names:
        remarks.append(f"timed by memory traffic only, no rule: {', '.join(sorted(names))}")
    for told in dict.fromkeys(a.likely for a in answers):
        share = "" if told.share is None else f"±{told.share:.0%}: "
        remarks.append(share + told.words)
    return [*remarks, f"not modelled: {', '.join(not_modelled(plan))}"]


def not_modelled(plan: Plan) -> list[str]:
    """What would change the numbers of a real run of this plan."""
    missing = ["reading the data", "compiled kernels", "failures", "memory that an allocator keeps"]
    if plan.roofline or not load_cluster(plan.cluster).gpu.kernels:
        missing += ["the shares of their peaks that kernels of this GPU reach"]
    return missing


def write(plan: Plan, answers: Sequence[Answer], folder: Path) -> list[Path]:
    """Table as CSV and JSON, the scaling picture, and the timeline of a small run."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = load_cluster(plan.cluster).name
    name = f"{plan.model}-{plan.how.replace(' ', '-')}-{plan.impl}-{cluster}"
    rows = [a.row() for a in answers]
    paths = [folder / f"{name}{end}" for end in (".json", ".csv", ".png")]
    told = {"plan": asdict(plan), "rows": rows, "not_modelled": not_modelled(plan)}
    paths[0].write_text(json.dumps(told, indent=2) + "\n")
    flat = [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in rows]
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    draw_scaling({plan.impl: answers}, paths[2], f"{plan.model} on {plan.cluster}")
    small = [a for a in answers if a.gpus <= PICTURED_GPUS]
    if small:
        chosen = max(small, key=lambda a: a.gpus)
        title = f"{plan.model} on {chosen.gpus} virtual GPUs of {plan.cluster}"
        paths.append(draw(chosen.spans, folder / f"{name}-timeline.png", title))
        paths.append(chrome_trace(chosen.spans, folder / f"{name}-timeline.json"))
    return paths


def draw_scaling(curves: dict[str, Sequence[Answer]], path: Path, title: str) -> Path:
    """Throughput against the ideal, and where the step's time goes, over the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    for name, answers in curves.items():
        gpus = [a.gpus for a in answers]
        left.loglog(gpus, [a.rate for a in answers], marker="o", label=name)
        right.semilogx(
            gpus, [a.efficiency for a in answers], marker="o", label=f"{name}: efficiency"
        )
        share = [a.communication_share for a in answers]
        right.semilogx(gpus, share, marker="s", ls="--", label=f"{name}: waits for communication")
    first = next(iter(curves.values()))
    gpus = [a.gpus for a in first]
    ideal = [first[0].rate / first[0].gpus * g for g in gpus]
    left.loglog(gpus, ideal, color="gray", ls=":", label="ideal")
    left.set(xlabel="GPUs", ylabel=f"{first[0].unit} per second", title="throughput")
    right.set(xlabel="GPUs", ylabel="share", ylim=(-0.02, 1.05), title="efficiency")
    for axes in (left, right):
        axes.set_xticks(gpus, [str(g) for g in gpus])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
