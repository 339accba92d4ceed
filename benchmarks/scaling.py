"""1 to 256 GPUs: the tables of ``docs/scaling.md``, from the virtual cluster, and exercise 3.21.

``python -m benchmarks.scaling`` runs every cell that is not recorded yet (``--model``, ``--gpus``:
some of them), writes them to ``docs/scaling/<model>.json``, and makes the page and its pictures
from the recorded cells. Virtual time is exact: a cell comes out the same on every machine. All
cells together take a processor about a quarter of an hour. Most of it goes into the rows of
messages, in which every rank runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from distlab.simulate.choices import ALIKE
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import simulate

from . import scaling_page
from .scaling_page import FOLDER

COUNTS = (1, 2, 8, 16, 64, 256)
CLUSTERS = {
    "resnet50": ("dgx-h100", "p4d-a100"),
    "gpt-1b": ("dgx-h100",),
    "gpt-7b": ("dgx-h100",),
}
MOST = {"dgx-h100": 256, "p4d-a100": 16}  # two GPUs share a card of p4d-a100: many roles run
LARGE_BUCKET = {"resnet50": 25.0, "gpt-1b": 250.0, "gpt-7b": 1000.0}  # MiB, where messages are run
UNINTERESTING = ("efficiency", "bubble", "unmodelled", "likely", "error")  # of a cell by itself
LIMIT = 1800.0  # real seconds of a cell


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the tables; ``most`` GPUs are simulated."""

    name: str
    strategy: str
    most: int = 256
    least: int = 1
    servers: int = 0  # 1 in so many GPUs; 0: one in all
    asynchronous: bool = False
    bucket_mb: float = 0.0  # 0: the usual size
    fused: bool = False  # the optimizer is one kernel

    def plan(self, cluster: str, model: str, gpus: int) -> Plan:
        """How a cell is simulated."""
        options: dict[str, Any] = {}
        if self.strategy in MESSAGES:
            options["bucket_mb"] = LARGE_BUCKET[model]
        if self.bucket_mb:
            options["bucket_mb"] = self.bucket_mb
        if self.fused:
            options["fused"] = ("optimizer",)
        if self.servers:
            options["servers"] = max(1, gpus // self.servers)
        if self.asynchronous:
            options |= {"staleness": float("inf"), "every": 4}
        return Plan(
            cluster=cluster,
            model=model,
            gpus=(gpus,),
            strategy=self.strategy,
            timeout=LIMIT,
            **options,
        )


MESSAGES = ("ring", "tree", "halving-doubling", "hierarchical")
ROWS = (
    Row(name="all-reduce, nothing hidden", strategy="ddp"),
    Row(name="DDP in buckets", strategy="bucketed"),
    Row(name="ZeRO-1", strategy="zero1"),
    Row(name="ZeRO-2", strategy="zero2"),
    Row(name="FSDP with prefetch", strategy="fsdp"),
    Row(name="hybrid FSDP", strategy="hybrid"),
    Row(name="local SGD, 8 steps", strategy="local-sgd"),
    Row(name="DDP, own ring", strategy="ring", most=16, least=2),
    Row(name="DDP, own tree", strategy="tree", most=16, least=2),
    Row(name="DDP, own halving-doubling", strategy="halving-doubling", most=16, least=2),
    Row(name="DDP, own hierarchical", strategy="hierarchical", most=16, least=2),
    Row(name="parameter server, 1", strategy="parameter-server", most=16, least=2),
    Row(name="parameter servers, 1 in 4", strategy="parameter-server", most=16, least=4, servers=4),
    Row(
        name="asynchronous, servers 1 in 4",
        strategy="parameter-server",
        most=16,
        least=4,
        servers=4,
        asynchronous=True,
    ),
)
EXTRA = {  # in no table: what the texts compare with
    "resnet50": (),
    "gpt-1b": (
        (Row(name="ZeRO-1, 250 MiB", strategy="zero1", bucket_mb=250.0), 64),
        (Row(name="DDP, 250 MiB", strategy="bucketed", bucket_mb=250.0), 64),
        (Row(name="DDP, fused AdamW", strategy="bucketed", fused=True), 16),
        (Row(name="FSDP, fused AdamW", strategy="fsdp", fused=True), 16),
    ),
    "gpt-7b": (
        (Row(name="DDP, fused AdamW", strategy="bucketed", fused=True), 16),
        (Row(name="FSDP, fused AdamW", strategy="fsdp", fused=True), 16),
    ),
}


def cells(model: str) -> Iterator[tuple[str, Row, int]]:
    """(cluster, row, GPUs) of a model's tables, the cheap ones first."""
    found = [
        (cluster, row, gpus)
        for cluster in CLUSTERS[model]
        for row in ROWS
        for gpus in COUNTS
        if row.least <= gpus <= min(row.most, MOST[cluster])
    ]
    found += [(CLUSTERS[model][0], row, gpus) for row, gpus in EXTRA[model]]
    cost = {True: lambda gpus: gpus / 64, False: lambda gpus: gpus}  # of many that do the same
    yield from sorted(found, key=lambda cell: cost[cell[1].strategy in ALIKE](cell[2]))


def key_of(cluster: str, row: Row, gpus: int) -> str:
    """The key of a recorded cell."""
    return f"{cluster} | {row.name} | {gpus}"


def load(model: str) -> dict[str, dict[str, Any]]:
    """The recorded cells of a model."""
    path = FOLDER / f"{model}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def record(model: str, most_gpus: int, until: float) -> None:
    """Simulate the cells that are not recorded yet, until a time; each cell
    is kept when it is done."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = load(model)
    for cluster, row, gpus in cells(model):
        key = key_of(cluster, row, gpus)
        if key in known or gpus > most_gpus or time.time() > until:
            continue
        begun = time.perf_counter()
        (answer,) = simulate(row.plan(cluster, model, gpus))
        known[key] = {k: v for k, v in answer.row().items() if k not in UNINTERESTING}
        order = {key_of(*cell): n for n, cell in enumerate(cells(model))}
        kept = dict(sorted(known.items(), key=lambda item: order.get(item[0], len(order))))
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items())
        (FOLDER / f"{model}.json").write_text(f"{{\n{lines}\n}}\n")
        print(f"{model} {key}: {time.perf_counter() - begun:.0f} s", flush=True)


def main() -> None:
    """Record, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=list(CLUSTERS), help="none: only the page")
    parser.add_argument("--gpus", type=int, default=256, help="at most so many")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after these")
    options = parser.parse_args()
    until = time.time() + 60 * options.minutes
    for model in options.model:
        record(model, options.gpus, until)
    print(
        scaling_page.write(
            {m: load(m) for m in CLUSTERS}, {row.name: row.strategy for row in ROWS}, COUNTS
        )
    )


if __name__ == "__main__":
    main()
