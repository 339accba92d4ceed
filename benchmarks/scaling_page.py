"""``docs/scaling.md`` from the recorded cells: tables, pictures, and exercise 3.21's choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from distlab.simulate.published import Likely, kind_of, likely

from .scaling_choice import Cell, Cells, choices, merged
from .scaling_picture import draw
from .scaling_seen import after, seen

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "scaling"
INTRODUCTION = """# 1 to 256 GPUs, strategy by strategy

Written by `python -m benchmarks.scaling`. Every cell is a training step of the course's own
solution (`distlab simulate`). It runs on virtual GPUs whose clock is a model of compute and links.
A cell comes out the same on every machine, and [`docs/scaling/`](scaling) keeps each cell with all
its numbers. Settings are the defaults of `distlab simulate`. Compute takes the times of kernels
that were measured on an H100. An A100 takes the H100's shares of its own peaks, with loads of its
own. The links have closed forms, because no measured curve of these two clusters is known
([validation.md](validation.md) says more). The batch grows with the GPUs, so the ideal is a row
that stays as it is.

| model | parameters | dtype | per GPU | optimizer |
| --- | --- | --- | --- | --- |
| ResNet-50 | 25.6 million | fp32 | 32 images | SGD with momentum |
| GPT-1B | 1.3 billion | bfloat16 | 4 sequences of 2,048 tokens | AdamW |
| GPT-7B | 6.7 billion | bfloat16 | 1 sequence of 2,048 tokens | AdamW |

- *all-reduce, nothing hidden* is phase 1's trainer. *DDP in buckets* to *hybrid FSDP* are phase 3's
  (hybrid shards inside a node). In these rows many GPUs do the same. So one of them runs, and
  stands for all of its role. Tests compare with runs of every rank (`--every-rank`), to the last
  digit.
- *DDP, own …* sends its all-reduces message by message, as phase 3's exercises write them. Backward
  stops while they run. So compare these four rows with each other and with the first row. Their
  buckets are 25 MiB for ResNet-50, 250 MiB for GPT-1B, and 1,000 MiB for GPT-7B. *local SGD*
  averages parameters after every 8 steps.
- *parameter servers*: servers do not train, but they are GPUs, too. The throughput of a GPU is the
  throughput of all workers, divided by the number of all GPUs. *asynchronous* runs without rounds
  (exercise 3.23), with 4 steps per worker.
- *How sure?* The column *error* holds for the whole row. Predictions of published runs were at most
  so far off, in 9 of 10 runs. A line below each table says which runs these are. *Unknown*: no
  published run is near enough. A part of an error is common to all rows, because all rows have the
  same kernels. Nobody knows how large that part is. So do not rely on small differences between
  rows. In the pictures a band around *DDP in buckets* shows its error.
- *The optimizer* has the measured times of torch's default, `foreach`. A fused AdamW takes 0.4
  times as long (`--fused optimizer`). The texts below say what that changes.
- † marks a strategy that does not fit into the memory of one GPU. – marks a cell that was not run.
  Rows of messages and of `p4d-a100` end at 16 GPUs. With messages every rank runs, and Python
  executes each of them. Where two GPUs share a card, many ranks run.
"""
CHOICE = """## Does exercise 3.21 choose what is fastest?

Exercise 3.21 estimates memory and bytes from one step's profile. Of the strategies that fit, it
takes the one with the fewest *seconds on the wire*. The table compares its choice with the fastest
simulated strategy that fits. The candidates are DDP in buckets, ZeRO-1, ZeRO-2, FSDP and, on
several nodes, hybrid FSDP. A memory smaller than the GPU's stands for a smaller GPU of the same
speed. The last column says how much longer a step takes with 3.21's choice. If a row joins several
numbers of GPUs, it says so for the fewest and for the most."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def rows_of(
    cells: Cells,
    cluster: str,
    names: Iterable[str],
    counts: tuple[int, ...],
    show: Callable[[Cell], str],
) -> list[list[str]]:
    """A row for each strategy, a cell for each number of GPUs; – where there is none."""
    found = []
    for name in names:
        row = [cells.get((cluster, name, gpus)) for gpus in counts]
        if any(row):
            found.append([name, *("–" if cell is None else show(cell) for cell in row)])
    return found


def sure(model: str, cluster: str, strategy: str) -> Likely:
    """The error of a strategy's predictions on several GPUs."""
    return likely(kind_of(cluster, model, strategy, gpus=2))


def percent(error: Likely) -> str:
    """The error as a cell."""
    return "unknown" if error.share is None else f"±{error.share:.0%}"


def sure_line(model: str, cluster: str) -> str:
    """Which published runs the errors of a table are from."""
    told = []
    for rows, strategy in {"ZeRO and FSDP": "fsdp", "all other rows": "ddp"}.items():
        error = sure(model, cluster, strategy)
        share = "" if error.share is None else f"{percent(error)}, "
        told.append(f"Error of {rows}: {share}{error.words}.")
    return " ".join(told)


def rate_of(cell: Cell) -> str:
    """Throughput per GPU; marked if the memory does not suffice."""
    return f"{cell['rate'] / cell['gpus']:,.0f}" + ("" if cell["fits"] else "†")


def rest_of(cell: Cell) -> str:
    """Memory and the share of the step in which the GPU waits for communication."""
    mark = "" if cell["fits"] else "†"
    return f"{cell['memory'] / 1e9:.1f}{mark} · {cell['exposed'] / cell['step']:.0%}"


def by_numbers(raw: dict[str, Cell]) -> Cells:
    """A model's recorded cells by cluster, row and GPUs."""
    found = {}
    for key, cell in raw.items():
        cluster, name, gpus = key.split(" | ")
        found[cluster, name, int(gpus)] = cell
    return found


def write(
    recorded: dict[str, dict[str, Cell]], strategies: dict[str, str], counts: tuple[int, ...]
) -> Path:
    """The page and its pictures; ``recorded``: by model, then by key."""
    for model, raw in recorded.items():
        path, title = FOLDER / f"{model}.png", f"{model}: one step on virtual GPUs"
        cells = by_numbers(raw)
        errors = {cluster: sure(model, cluster, "bucketed").share for cluster, _, _ in cells}
        draw(cells, counts, path, title, errors)
    page = FOLDER.parent / "scaling.md"
    page.write_text(page_of(recorded, strategies, counts), encoding="utf-8")
    return page


def page_of(
    recorded: dict[str, dict[str, Cell]], strategies: dict[str, str], counts: tuple[int, ...]
) -> str:
    """The text of the page; ``strategies``: by the name of the row."""
    parts = [INTRODUCTION.strip()]
    chosen: list[list[str]] = []
    every = {model: by_numbers(raw) for model, raw in recorded.items()}
    for model, cells in every.items():
        parts += [f"## {model}", seen(model, cells)]
        parts += [f"![{model}: throughput and memory](scaling/{model}.png)"]
        parts += tables_of(model, cells, strategies, counts)
        chosen += [[model, *row] for row in choices(cells, model, counts)]
    heads = ["model", "cluster", "memory", "GPUs", "3.21 chooses", "fastest", "difference"]
    parts += [CHOICE.strip(), table(heads, merged(chosen)), after(every)]
    return "\n\n".join(parts) + "\n"


def tables_of(
    model: str, cells: Cells, strategies: dict[str, str], counts: tuple[int, ...]
) -> Iterator[str]:
    """Throughput, then memory and waiting, on each cluster."""
    unit = next(iter(cells.values()))["unit"]
    heads = ["GPUs", *map(str, counts)]
    for cluster in dict.fromkeys(cluster for cluster, _, _ in cells):
        rates = rows_of(cells, cluster, strategies, counts, rate_of)
        rates = [[*row, percent(sure(model, cluster, strategies[row[0]]))] for row in rates]
        rest = rows_of(cells, cluster, strategies, counts, rest_of)
        waits = "GB of memory per GPU · share of the step that waits for communication"
        yield f"**{cluster}: {unit} per second and GPU**"
        yield table([*heads, "error"], rates)
        yield sure_line(model, cluster)
        yield f"**{cluster}: {waits}**"
        yield table(heads, rest)
