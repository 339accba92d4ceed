"""``docs/scaling.md`` from the recorded cells: tables, pictures, and exercise 3.21's choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .scaling_choice import Cell, Cells, choices, merged
from .scaling_picture import draw

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "scaling"
INTRODUCTION = """# 1 to 256 GPUs, strategy by strategy

Written by `python -m benchmarks.scaling`. Every cell is a training step of the course's own
solution (`distlab simulate`). It runs on virtual GPUs whose clock is a model of compute and links.
Nothing here was measured on hardware. A cell comes out the same on every machine, and
[`docs/scaling/`](scaling) keeps each cell with all its numbers. Settings are the defaults of
`distlab simulate --roofline`: every kernel reaches the rates of the cluster's file. Without
`--roofline` an H100 has the times of measured kernels, and steps are longer. The batch grows with
the GPUs, so the ideal is a row that stays as it is.

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
- *How sure?* A cell has no error bar of its own. [A table](../benchmarks/README.md) compares with
  published measurements. Throughput and efficiency come out 1 to 44 % too high, and the time that
  overlap saves comes out 68 % too low. The 44 % are FSDP's, on 8 H100. Nobody knows how much of an
  error is common to all rows. So do not rely on small differences between rows. For a number to
  plan with, take measured kernels: [validation.md](validation.md) shows their errors.
- *The optimizer takes too long*. On meta tensors torch steps parameter by parameter. On CUDA
  `foreach` is the default (`torch/utils/_foreach_utils.py`, 2.15), and a fused AdamW reads and
  writes 14 bytes per bfloat16 parameter. Here AdamW moves about 50 bytes. The texts below say what
  that changes.
- † marks a strategy that does not fit into the memory of one GPU. – marks a cell that was not run,
  because every rank would have to run there, and Python executes each of their messages.
"""
SEEN = {
    "resnet50": """
Everything fits, and 102 MB of gradients are little. Up to 64 GPUs every strategy that hides its
messages stays within a few percent of one GPU.

FSDP is ahead mostly because of the model of time. FSDP's optimizer steps 17 flat tensors, and DDP's
steps 161 small ones. Each tensor takes several kernels of at least 5 µs. On one GPU nothing is
shared, and this difference already makes 2.6 of the 2.8 ms between the two. With `foreach`, DDP's
step on one GPU takes 21.8 instead of 24.1 ms, and FSDP's takes 21.3 instead of 21.5 ms.

With 128 and more GPUs FSDP falls off. A gather or reduce-scatter goes round all GPUs step by step,
and each of 17 small units pays that latency three times. Hybrid FSDP goes round 8 GPUs and stays
level on `dgx-h100`. On `ethernet-v100` the 8 GPUs of a node share one card. Their all-reduces
between the nodes take turns there, and with 256 GPUs each GPU is 8 % slower than with 8.

Between nodes the own all-reduces differ. The hierarchical one sends 1/8 of the bytes over each
network card, and wins from 16 GPUs on. It wins most on `ethernet-v100`, where 8 GPUs share one
card, and where halving-doubling sends nearly all bytes through that card.

One parameter server is at its limit with 8 GPUs. Twice as many workers then give hardly more
images, because all values pass its one port. More servers move that limit. Without rounds no worker
waits for the slowest one.
""",
    "gpt-1b": """
There are 2.6 GB of gradients. DDP in buckets hides nearly all of their communication. If a step
waits for it instead, that costs 9 %. FSDP is fastest from 2 GPUs on *and* needs least memory. Its
gathers are hidden as well, and the ranks share the work of AdamW, which takes a fifth of DDP's step
here. Without the optimizer's time FSDP and DDP differ by 1 % on 16 GPUs.

Inside a node ZeRO-1 and ZeRO-2 win by the same shorter update. But they gather the new parameters
when no compute is left that could hide it. From 16 GPUs on they lose because of their buckets.
These rows have buckets of 25 MiB, and each bucket pays the latency of a ring of all GPUs. With
buckets of 250 MiB a ZeRO-1 step on 64 GPUs takes 131 instead of 175 ms, and DDP's step takes 147
ms.

Of the all-reduces that are written from messages, only the hierarchical one stays close to the
backend's between nodes. A ring in the order of the ranks leaves a node through one of its eight
cards. A parameter server's memory includes the memory that it uses on the host.
""",
    "gpt-7b": """
With one sequence per GPU there is little compute that could hide messages, and memory decides. DDP
takes 62 of 80 GB, but only because everything is bfloat16 here, AdamW's moments too: 8 bytes per
parameter. Exercise 3.17 says why one does not train like that. Float32 weights and moments beside
16-bit copies take 16 bytes per parameter. That is 107 GB, and DDP does not fit. Phase 1's trainer
joins the gradients and takes all of the 80 GB. FSDP takes 13 GB on 16 GPUs and 11 GB on 64 GPUs.

Up to 64 GPUs FSDP is also 1.3 to 1.8 times as fast in the table. Most of that is the optimizer. On
16 GPUs AdamW takes 105 ms of DDP's step of 246 ms, and 6 ms of FSDP's step. A fused AdamW with 14
bytes per parameter would take 31 and 2 ms. Then FSDP is 1.2 times as fast instead of 1.7 times.

Up to 128 GPUs hybrid FSDP is behind full FSDP. The eight cards of a node carry a ring through all
GPUs as fast as NVLink carries a ring inside the node. So hybrid FSDP saves no time there. It also
loses some, because transfers inside a node and between nodes wait for each other at a GPU's port.
In this model a port does one transfer at a time, while a real GPU may overlap them. With 256 GPUs
the latency of a ring through all GPUs costs more, and hybrid FSDP is 1.2 times as fast.
""",
}
AFTER = """
If few strategies fit, 3.21 chooses the fastest one, but for GPT-7B on 256 GPUs. If several fit,
its choice is right about bytes, and bytes are not time:

- *Hiding.* The estimate assumes that nothing is hidden. FSDP sends half as many bytes again as DDP,
  but before they are needed. ZeRO-1 and ZeRO-2 gather the new parameters when no compute is left
  beside it.
- *The optimizer.* The estimate leaves it out. Sharding divides its time by W. With the simulator's
  AdamW that saves the GPTs more time than the wire takes. With a fused AdamW it saves less than a
  third of that.
- *Latency.* The estimate leaves it out as well. For ZeRO-2 on 256 GPUs latency is most of the step.
  For FSDP with GPT-7B on 256 GPUs it is so long that hybrid FSDP is faster.

So ask 3.21's table which strategies fit and how many bytes they send. Ask a simulation which one is
fastest. With slow links, several backward passes or little memory the two agree. Offload is not
simulated.
"""
CHOICE = """## Does exercise 3.21 choose what is fastest?

Exercise 3.21 estimates memory and bytes from one step's profile. Of the strategies that fit, it
takes the one with the fewest *seconds on the wire*. The table compares its choice with the fastest
simulated strategy that fits. The candidates are DDP in buckets, ZeRO-1, ZeRO-2, FSDP and, on
several nodes, hybrid FSDP. A memory smaller than the GPU's stands for a smaller GPU of the same
speed. The last column says how much longer a step takes with 3.21's choice. If a row joins several
numbers of
GPUs, it says so for the fewest and for the most."""


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
