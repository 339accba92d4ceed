"""Diagrams of exercise 3.34: when the link carries how much, and what a training loses by it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from distlab.hardware.clusters import Link, load_cluster
from distlab.hardware.collectives import collective_time
from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from solutions.phase3_multi_node.local_sgd import DiLoCo, LocalSGD
from solutions.phase3_multi_node.streaming_diloco import StreamingDiLoCo, strided

from .plots import axes
from .registry import ROOT, diagram
from .shapes import Cell, row
from .sheet import Sheet
from .times import Bar, lanes

STEPS, STEP = 8, 0.01  # seconds of an inner step
LINK = Link(alpha=1e-4, bandwidth=2.5e6)
CLUSTER = dataclasses.replace(
    load_cluster("ethernet-v100"), gpus_per_node=1, between=LINK, launch=0.0
)
Rounds = Callable[[nn.Sequential], LocalSGD]
WAYS: dict[str, Rounds] = {
    "the mean in every step": lambda model: LocalSGD(model, every=1),
    "DiLoCo, H = 4": lambda model: DiLoCo(model, every=4),
    "Streaming, F = 2, τ = 1": lambda model: StreamingDiLoCo(
        model, strided([*model], 2), every=4, delay=1
    ),
}


def body(ctx: RankContext, name: str) -> list[float]:
    """When each step began, and when the last one was over, with its message if it waits for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    rounds, begun = WAYS[name](model), list[float]()
    with ctx.region("steps"):
        for _ in range(STEPS):
            begun.append(time.monotonic())
            time.sleep(STEP)
            rounds.step()
    done = time.monotonic()
    rounds.finish()
    return [*begun, done]


def busy(name: str) -> tuple[list[Bar], list[Bar], list[float], float]:
    """Of rank 0: its steps, when the link is busy, the kB that it sends each time, and waiting."""
    results = run_virtual(body, 2, name, cluster=CLUSTER)
    *begun, done = results[0]
    origin = begun[0]
    steps = [
        Bar(start - origin, start - origin + STEP, str(k + 1), "blue")
        for k, start in enumerate(begun)
    ]
    events = results.logs[0].select(region="steps").events
    link = []
    for event in events:
        start = event.start - origin
        seconds = collective_time(event.op, event.payload, (0, 1), CLUSTER)
        link.append(Bar(start, start + seconds, "", "orange", strong=True))
    waited = done - origin - STEPS * STEP
    return steps, link, [event.sent / 1000 for event in events], waited


@diagram("3.34", "The link carries little, and while the ranks compute")
def streams(sheet: Sheet) -> None:
    runs = {name: busy(name) for name in WAYS}
    span = max(bar.end for steps, link, *_ in runs.values() for bar in (*steps, *link))
    for name, (steps, link, sent, waited) in runs.items():
        sheet.note(
            f"{name}: {len(sent)} x {max(sent):.1f} kB, waits {waited * 1000:.0f} ms", bold=True
        )
        lanes(sheet, {"steps": steps, "link": link}, span, label=50, h=20, apart=4)
        sheet.gap(8)
    most = {name: max(sent) for name, (_, _, sent, _) in runs.items()}
    first, *_, last = most.values()
    sheet.note(
        f"Two sites, {LINK.bandwidth * 8 / 1e6:.0f} Mbit/s between them, {STEP * 1000:.0f} ms per "
        f"step. DiLoCo waits on any link. Streaming gives {last:.1f} kB the time of one step: "
        f"{last / STEP * 8 / 1000:.1f} Mbit/s are enough. A message per step beside compute would "
        f"need {first / STEP * 8 / 1000:.0f} Mbit/s."
    )


TOLD = {
    "DDP": "grey",
    "DiLoCo": "blue",
    "streaming, 32 bits": "orange",
    "streaming, 4 bits": "green",
}


def measured() -> dict[str, Any]:
    """The numbers of ``python -m benchmarks.streaming_loss``."""
    path = ROOT / "benchmarks" / "streaming_loss.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@diagram("3.34-2", "DiLoCo's loss, with a small part of its peak")
def peaks(sheet: Sheet) -> None:
    found = measured()
    kinds, every, steps = found["kinds"], found["every"], found["steps"]
    most = max(kinds["DDP"]["sent"][every:]) / 1000
    plot = axes(sheet, (every + 0.5, 3 * every + 0.5), (0, most), height=130, left=46, right=130)
    plot.frame(
        {step: f"{step}" for step in range(every + 3, 3 * every + 1, 3)},
        {0: "0", most / 2: f"{most / 2:.0f}", most: f"{most:.0f}"},
        "step",
        "kB that a rank sends, in the second and third round",
    )
    for shift, (kind, tone) in enumerate(TOLD.items()):
        sent = kinds[kind]["sent"]
        for step in range(every + 1, 3 * every + 1):
            if sent[step - 1]:
                x = step + 0.22 * (shift - 1.5)
                plot.line([(x, 0), (x, sent[step - 1] / 1000)], tone)
        plot.word(3 * every + 0.5, most * (1 - shift / 4), kind, tone)
    heads = ("kB per step", "Mbit/s", "ms waiting", "loss")
    row(sheet, "", [Cell(words, "plain", bold=True) for words in heads], x=150, w=92)
    for kind, tone in TOLD.items():
        row(sheet, kind, [Cell(words, tone) for words in told(found, kind)], x=150, w=92)
    plot = axes(sheet, (0, steps / every), (2, 4.5), height=130, left=46, right=130)
    plot.frame(
        {0: "0", steps / every / 2: f"{steps // 2}", steps / every: f"{steps}"},
        {2: "2", 3: "3", 4: "4"},
        "step",
        "loss of a round's steps, mean of ranks and seeds",
    )
    for up, (kind, tone) in zip((-18, -6, 10, 26), TOLD.items(), strict=True):
        curve = [(k + 0.5, loss) for k, loss in enumerate(kinds[kind]["curve"])]
        plot.line(curve, tone, dashed=kind == "DiLoCo")
        plot.word(*curve[-1], kind, tone, up=up)
    sheet.note(
        f"Tiny GPT, {found['ranks']} ranks in two nodes, 20 Mbit/s between them, "
        f"{found['step'] * 1000:.0f} ms per step, H = {every}, F = {found['fragments']}, "
        f"τ = {found['delay']}. kB: what a rank sends on the average. Mbit/s: two thirds "
        "of that cross the link; at this rate the largest message takes a step, or τ steps when "
        "streaming. "
        "Waiting: per step. Loss: on test data at the end, mean of three seeds."
    )


class Told(NamedTuple):
    """Of a strategy: kB that a rank sends and ms that it waits, per step; Mbit/s of the link."""

    sent: str
    rate: str
    waited: str
    loss: str


def told(found: dict[str, Any], kind: str) -> Told:
    """The strategy's row; ``rate`` carries the largest message in the time that it has.

    Of an all-reduce of N bytes in two nodes N leave each node, and W/2·n of an all-gather of n: the
    same share of what a rank sends in a ring.
    """
    run, ranks, time_of = found["kinds"][kind], found["ranks"], found["step"]
    if kind.startswith("streaming"):
        time_of *= found["delay"]
    rounds = run["sent"][found["every"] :]
    leaves = max(rounds) * ranks / (2 * (ranks - 1))
    return Told(
        f"{sum(rounds) / len(rounds) / 1000:.0f}",
        f"{leaves * 8 / 1e6 / time_of:.1f}",
        f"{run['waited'] * 1000:.1f}",
        f"{sum(run['losses']) / len(run['losses']):.2f}",
    )
