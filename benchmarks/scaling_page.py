"""``docs/scaling.md`` from the recorded cells: tables, pictures, and exercise 3.21's choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .scaling_choice import Cell, Cells, choices, merged
from .scaling_picture import draw

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "scaling"
INTRODUCTION = """# 1 to 256 GPUs, strategy by strategy

Written by `python -m benchmarks.scaling`: every cell is a training step of the course's own
solution (`distlab simulate`), run on virtual GPUs whose clock is a model of compute and links.
Nothing here was measured on hardware; the same cell comes out the same on every machine, and
[`docs/scaling/`](scaling) keeps each with all its numbers. Settings are the defaults of
`distlab simulate`: ResNet-50 in fp32 with 32 images per GPU and SGD with momentum, GPT-1B (1.3
billion parameters) and GPT-7B (6.7 billion) in bfloat16 with 4 and 1 sequences of 2,048 tokens per
GPU and AdamW. The batch grows with the GPUs: the ideal is a row that stays as it is.

- *all-reduce, nothing hidden* is phase 1's trainer, *DDP in buckets* to *hybrid FSDP* are phase 3's
  (hybrid shards inside a node). There all GPUs do the same, so the first and the last are run and
  stand for all (`--two-ranks`; tests compare with runs of every rank, to the last digit).
- *DDP, own …* sends its all-reduces message by message, as phase 3's exercises write them. It
  stops backward while it does: compare these four rows with each other and with the first. Their
  buckets are 25 MiB for ResNet-50, 250 MiB for GPT-1B, 1,000 MiB for GPT-7B. *local SGD* averages
  parameters after every 8 steps.
- *parameter servers*: servers do not train, so a GPU's throughput is that of all of them over all
  GPUs. *asynchronous* runs without rounds (exercise 3.23), 4 steps per worker.
- *How sure?* A cell has no error bar of its own. Against published measurements throughput and
  efficiency come out 1 to 44 % too high, and what overlap saves 68 % too low
  ([the table](../benchmarks/README.md)). The 44 % are FSDP's, on 8 H100. How much of an error is
  common to all rows is not known: do not rely on small differences between them.
- *The optimizer is too dear*. On meta tensors torch steps parameter by parameter; on CUDA `foreach`
  is the default (`torch/utils/_foreach_utils.py`, 2.15), and a fused AdamW reads and writes 14
  bytes per bfloat16 parameter. Here AdamW moves about 50. The texts say what that changes.
- † does not fit into the memory of one GPU. – was not run: there every rank must run, and each
  of its messages is executed in Python.
"""
SEEN = {
    "resnet50": """
Everything fits, and 102 MB of gradients are little: up to 64 GPUs all that hides its messages stays
within a few percent of one GPU. FSDP is ahead mostly because of the model of time. Its optimizer
steps 17 flat tensors, DDP's 161 small ones, and each takes several kernels of at least 5 µs. On one
GPU, where nothing is shared, that already saves 2.6 of the 2.8 ms between the two. With `foreach`,
DDP's step on one GPU takes 21.8 instead of 24.1 ms, and FSDP's 21.3 instead of 21.5. With 128 and
more it falls off: a gather or reduce-scatter goes round all GPUs step by step, and 17 small units
pay that latency three times each; hybrid FSDP goes round 8 and stays level. Between nodes the own
all-reduces part: hierarchical sends 1/8 of the bytes over each card and wins from 16 GPUs on, most
of all on `ethernet-v100`, whose 8 GPUs share one card, and where halving-doubling sends nearly
everything through it. One parameter server is at its limit with 8 GPUs: twice as many workers then
give hardly more images, because all values pass its one port. More servers move that limit, and
without rounds nobody waits for the slowest.
""",
    "gpt-1b": """
2.6 GB of gradients, and DDP in buckets hides nearly all of it; left to wait for, it costs 9 %. FSDP
is fastest from 2 GPUs on *and* needs least memory: gathers hide as well, and AdamW, a fifth of
DDP's step here, is shared. Without the optimizer's time FSDP and DDP differ by 1 % on 16 GPUs.
ZeRO-1 and ZeRO-2 win by the same shorter update inside a node, but gather the new parameters when
nothing is left to hide behind. That they lose from 16 GPUs on is due to their buckets: these rows
have 25 MiB, and each bucket pays the latency of a ring of all GPUs. With 250 MiB a ZeRO-1 step on
64 GPUs takes 130 instead of 175 ms, and DDP's 147. Written from messages, only hierarchical stays
close to the backend's all-reduce between nodes: a ring in the order of the ranks leaves a node
through one of its eight cards. A parameter server's memory counts what it holds on the host.
""",
    "gpt-7b": """
With one sequence per GPU there is little to hide behind, and memory decides. DDP takes 62 of 80 GB,
but only because all is bfloat16 here, AdamW's moments too: 8 bytes per parameter. Exercise 3.17
says why one does not train like that. With float32 weights and moments beside 16-bit copies it is
16 bytes per parameter, 107 GB, and DDP does not fit. Phase 1's trainer, which joins the gradients,
takes all of the 80 GB; FSDP takes 13 GB on 16 GPUs and 11 on 64.

Up to 64 GPUs FSDP is also 1.3 to 1.8 times as fast in the table, and most of that is the optimizer.
AdamW takes 105 ms of DDP's step on 16 GPUs, 246 ms, and 6 ms of FSDP's. A fused one with 14 bytes
per parameter would take 31 and 2 ms; then FSDP is 1.2 times as fast instead of 1.7. Hybrid FSDP is
behind full FSDP: eight cards per node carry a ring through all GPUs as fast as NVLink carries it
inside, so it saves no time, and what goes inside and what goes between nodes wait for each other at
a GPU's port (in this model a port does one transfer at a time; a real GPU may overlap them).
""",
}
AFTER = """
Where little fits, the choice is the fastest. Where several do, it is right about bytes, and bytes
are not time:

- *Nothing hidden* is assumed. FSDP sends half as much again as DDP, but before it is needed; the
  ZeROs' gather of new parameters comes when there is no compute left beside it.
- *The optimizer* is not in the estimate. Sharded, its time is divided by W. With the simulator's
  AdamW that saves the GPTs more than the wire takes; with a fused one it saves less
  than a third of that.
- *Latency* is not, either: for ZeRO-2 on 256 GPUs it is most of the step.

So take 3.21's table for what fits and what it sends, and a simulation for what is fastest; with
slow links, several backward passes or little memory they agree. Offload is not simulated.
"""
CHOICE = """## Does exercise 3.21 choose what is fastest?

Exercise 3.21 estimates memory and bytes from one step's profile and takes, of what fits, the least
*seconds on the wire*. Here its choice is set against the fastest simulated strategy that fits,
among DDP in buckets, ZeRO-1, ZeRO-2, FSDP and (on several nodes) hybrid; less than a GPU has stands
for a smaller GPU of the same speed. The last column says how much longer a step takes with 3.21's
choice; where lines are joined, for the fewest and the most GPUs."""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def rows_of(
    cells: Cells,
    cluster: str,
    names: list[str],
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


def write(recorded: dict[str, dict[str, Cell]], names: list[str], counts: tuple[int, ...]) -> Path:
    """The page and its pictures; ``recorded``: by model, then by key."""
    for model, raw in recorded.items():
        path, title = FOLDER / f"{model}.png", f"{model}: one step on virtual GPUs"
        draw(by_numbers(raw), counts, path, title)
    page = FOLDER.parent / "scaling.md"
    page.write_text(page_of(recorded, names, counts), encoding="utf-8")
    return page


def page_of(recorded: dict[str, dict[str, Cell]], names: list[str], counts: tuple[int, ...]) -> str:
    """The text of the page."""
    parts = [INTRODUCTION.strip()]
    chosen: list[list[str]] = []
    for model, raw in recorded.items():
        cells = by_numbers(raw)
        unit = next(iter(cells.values()))["unit"]
        parts += [f"## {model}", SEEN[model].strip()]
        parts += [f"![{model}: throughput and memory](scaling/{model}.png)"]
        heads = ["GPUs", *map(str, counts)]
        for cluster in dict.fromkeys(cluster for cluster, _, _ in cells):
            rates = rows_of(cells, cluster, names, counts, rate_of)
            rest = rows_of(cells, cluster, names, counts, rest_of)
            waits = "GB of memory per GPU · share of the step that waits for communication"
            parts += [f"**{cluster}: {unit} per second and GPU**", table(heads, rates)]
            parts += [f"**{cluster}: {waits}**", table(heads, rest)]
        chosen += [[model, *row] for row in choices(cells, model, counts)]
    heads = ["model", "cluster", "memory", "GPUs", "3.21 chooses", "fastest", "difference"]
    parts += [CHOICE.strip(), table(heads, merged(chosen)), AFTER.strip()]
    return "\n\n".join(parts) + "\n"
