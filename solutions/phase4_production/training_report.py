"""The report of a run: plots, and a page that names the bottleneck with its numbers.

    python -m solutions.phase4_production.training_report FOLDER

reads ``FOLDER/metrics.jsonl`` as the JSON-lines sink wrote it, also of a run that goes on or was
killed, and writes ``report.md`` and its PNGs beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .monitoring import PHASES
from .sinks import Bottleneck, find_bottleneck, read_json_lines

ADVICE = {
    "straggler": "Look at that rank's machine at that time: clocks and temperature, other "
    "processes, its link to the storage.",
    "data": "More loader workers, decoded or smaller images, storage nearer to the ranks.",
    "communication": "More overlap (bucket sizes), fewer bytes (compression, accumulation), a "
    "pattern that suits the topology; see exercises 3.7–3.12 and 4.6–4.9.",
    "memory": "No larger batch fits. Shard (ZeRO, FSDP), checkpoint activations, or offload.",
    "compute": "Time goes where it should. Lower precision, `torch.compile`, channels-last and "
    "more ranks make it faster.",
}
RESULTS = {  # of an evaluation: their names and formats
    "top1": ("top-1 accuracy", ".2%"),
    "top5": ("top-5 accuracy", ".2%"),
    "perplexity": ("perplexity", ".3f"),
}
COLOURS = ("#8c6bb1", "#4292c6", "#08519c", "#41ab5d", "#d94801", "#bdbdbd")


def write_report(folder: str | Path) -> Path:
    """Write ``report.md`` and its plots into ``folder``; returns the page's path.

    Raises ValueError if there are no metrics in ``folder``.
    """
    folder = Path(folder)
    source = folder / "metrics.jsonl"
    if not source.is_file():
        raise ValueError(f"{source} does not exist: nothing to report on")
    records = read_json_lines(source)
    found = find_bottleneck(records)
    plots = draw(folder, records)
    page = folder / "report.md"
    page.write_text(text(records, found, plots), encoding="utf-8")
    return page


def text(records: Sequence[dict[str, Any]], found: Bottleneck, plots: Sequence[Path]) -> str:
    """The page, in Markdown."""
    last = records[-1]

    def values(name: str) -> list[float]:
        return [r[name] for r in records[1:] or records if r.get(name) is not None]

    def median(name: str) -> float | None:
        return statistics.median(known) if (known := values(name)) else None

    step, hidden = (
        statistics.median(values(name)) for name in ("step_seconds", "hidden_communication_seconds")
    )
    rows = [
        ("steps", f"{records[0]['step'] + 1} to {last['step'] + 1}, on {last['ranks']} ranks"),
        ("loss", f"{_number(records[0]['loss'], '.4f')} to {_number(last['loss'], '.4f')}"),
        *[(f"{name} of the last evaluation", value) for name, value in evaluated(records)],
        ("samples per second", _number(median("samples_per_second"), ",.1f")),
        ("tokens per second", _number(median("tokens_per_second") or None, ",.1f")),
        ("step", f"{1e3 * step:,.1f} ms"),
        ("hidden communication of a step", f"{1e3 * hidden:,.1f} ms"),
        ("model-FLOPs utilisation", _number(median("mfu"), ".1%")),
        ("GPU utilisation", _number(median("gpu_utilisation"), ".0%")),
        ("memory used of what there is", _number(median("memory_share"), ".1%")),
    ]
    lines = ["# Training report", "", f"**Bottleneck: {found.kind}.** {evidence(records, found)}"]
    lines += ["", ADVICE[found.kind], "", "| a step's time | share | ms |", "| --- | ---: | ---: |"]
    times = {kind: share for kind, share in found.shares.items() if kind != "memory"}
    times["the rest"] = max(0.0, 1.0 - sum(times.values()))
    lines += [f"| {kind} | {s:.1%} | {1e3 * s * step:,.1f} |" for kind, s in times.items()]
    lines += ["", "| the run (rates, times and shares: medians) | |", "| --- | ---: |"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    for plot in plots:
        lines += ["", f"![{plot.stem.replace('_', ' ')}]({plot.name})"]
    return "\n".join(lines) + "\n"


def evidence(records: Sequence[dict[str, Any]], found: Bottleneck) -> str:
    """The numbers that say so, in a sentence or two."""
    share = found.shares[found.kind]
    if found.kind == "straggler":
        latest: dict[str, tuple[float, int]] = {}
        for record in records:
            for name in record:
                if name.startswith("slow_rank") and f"{name}_since" in record:
                    latest[name] = record[name], record[f"{name}_since"]
        named = [
            f"rank {name.removeprefix('slow_rank')} takes {factor:.2f} times as long as the others "
            f"since step {since + 1}"
            for name, (factor, since) in latest.items()
        ]
        return f"{'; '.join(named).capitalize()}. The others wait {share:.1%} of each step for it."
    return {
        "data": f"{share:.1%} of each step is spent waiting for batches.",
        "communication": f"{share:.1%} of each step is spent waiting for communication that "
        "nothing hides.",
        "memory": f"{share:.1%} of the memory is in use.",
        "compute": f"{share:.1%} of each step is forward, backward and optimizer; waiting for data "
        f"takes {found.shares['data']:.1%}, for communication "
        f"{found.shares['communication']:.1%}.",
    }[found.kind]


def evaluated(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The results of the newest record that has any."""
    newest: dict[str, Any] = next((r for r in reversed(records) if RESULTS.keys() & r.keys()), {})
    return [(n, _number(newest[key], f)) for key, (n, f) in RESULTS.items() if key in newest]


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def plot(name: str, label: str) -> tuple[Any, Any]:
    """An empty picture and its axes."""
    from matplotlib.figure import Figure  # no pyplot: it needs no display, and no global state

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=label, title=name.replace("_", " "))
    axes.grid(alpha=0.3)
    return figure, axes


def draw(folder: Path, records: Sequence[dict[str, Any]]) -> list[Path]:
    """The plots: loss, throughput, parts of a step, own time of each rank."""
    steps = [r["step"] + 1 for r in records]
    mark = "o" if len(records) < 30 else None

    def curve(name: str) -> list[float]:
        return [float("nan") if r.get(name) is None else r[name] for r in records]

    figures = {}
    figures["loss"], axes = plot("loss", "loss (mean over all ranks' samples)")
    axes.plot(steps, curve("loss"), marker=mark, markersize=3)
    figures["throughput"], axes = plot("throughput", "samples per second, all ranks")
    axes.plot(steps, curve("samples_per_second"), marker=mark, markersize=3)
    axes.set_ylim(bottom=0)

    figures["where_a_step_goes"], axes = plot("where_a_step_goes", "ms per step, mean of ranks")
    names = [*PHASES, "exposed_communication"]
    parts = [[1e3 * v for v in curve(f"{name}_seconds")] for name in names]
    whole = [1e3 * v for v in curve("step_seconds")]
    parts.append([max(0.0, w - sum(each)) for w, *each in zip(whole, *parts, strict=True)])
    labels = [*PHASES, "exposed communication", "rest"]
    axes.stackplot(steps, parts, labels=labels, colors=COLOURS)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)

    figures["own_time_of_each_rank"], axes = plot(
        "own_time_of_each_rank", "ms per step, not waiting"
    )
    for rank in range(records[-1]["ranks"]):
        own = [1e3 * v for v in curve(f"own_seconds_rank{rank}")]
        (line,) = axes.plot(steps, own, label=f"rank {rank}", alpha=0.6)
        slow = [k for k, record in enumerate(records) if f"slow_rank{rank}" in record]
        if slow:
            line.set(alpha=1.0, linewidth=2.5, label=f"rank {rank}, slow at ●")
            axes.plot([steps[k] for k in slow], [own[k] for k in slow], "o", color=line.get_color())
    axes.set_ylim(bottom=0)
    if records[-1]["ranks"] <= 16:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    paths = [folder / f"{name}.png" for name in figures]
    for figure, path in zip(figures.values(), paths, strict=True):
        figure.savefig(path, dpi=110)
    return paths


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the run wrote metrics.jsonl")
    try:
        print(write_report(parser.parse_args().folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
