"""The player of local SGD beside DDP: the same steps on a slow link, and how far ranks drift.

The model, the digits and both wrappers are real; what a step of compute takes is given, so that
pictures are the same on every machine. Ranks are not equally fast: the later ones vary.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from distlab.hardware.clusters import Link, load_cluster
from distlab.picture import Span, spans_of
from distlab.player.scene import Choice, Scene, document
from distlab.player.timeline import Bar, Moment, Panel, Row, Timeline, scene_of_timeline
from distlab.player.words import duration, several
from distlab.ranks.context import RankContext
from distlab.reference.workloads import build_model, digits
from distlab.virtual.reports import VirtualResults
from distlab.virtual.run import run_virtual

from .collectives import module_of

STEPS, BATCH, RATE = 8, 32, 0.1
RANKS = (2, 4)
EVERY = (1, 2, 4, 8)
SITES = Link(alpha=5e-3, bandwidth=12.5e6)  # 100 Mb/s between sites, 5 ms apart
SLOWER = (0.020, 0.024, 0.028, 0.036)  # seconds of a step, dealt out by rank and step
LEGEND = [
    ("compute", "step of a rank, with its number"),
    ("wait", "waits for a slower rank"),
    ("collective", "all-reduce"),
    ("rank5", "drift of local SGD"),
    ("rank0", "drift of DDP"),
]


def seconds_of(rank: int, step: int) -> float:
    """What a step of compute takes on a rank."""
    return SLOWER[(rank * 3 + step * 5) % len(SLOWER)]


def body(ctx: RankContext, every: int) -> list[Any]:
    """``STEPS`` steps; ``every`` 0: DDP. Begin, end, and (time, parameters) after each step."""
    images, labels = digits()[ctx.rank :: ctx.world_size]
    model = build_model("mlp", 0)
    wrapped = module_of(3, "overlap").BucketedDDP(model) if not every else model
    rounds = module_of(3, "local_sgd").LocalSGD(model, every=every) if every else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ctx.start_picture()
    begin, seen = time.monotonic(), []
    for step in range(STEPS):
        chosen = slice(BATCH * step, BATCH * (step + 1))
        with ctx.span("compute", str(step)):
            time.sleep(seconds_of(ctx.rank, step))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        if rounds is not None:
            alone = parameters_to_vector(model.parameters()).detach()
            seen.append((time.monotonic(), alone))
            rounds.step()
        seen.append((time.monotonic(), parameters_to_vector(model.parameters()).detach()))
    return [begin, time.monotonic(), [t for t, _ in seen], torch.stack([v for _, v in seen])]


def run(ranks: int, every: int) -> VirtualResults:
    """One training on ranks of which each is at another site."""
    cluster = dataclasses.replace(load_cluster("ethernet-v100"), gpus_per_node=1, between=SITES)
    return run_virtual(body, ranks, every, cluster=cluster)


def drift_of(results: VirtualResults) -> list[tuple[float, float]]:
    """(seconds, distance of the farthest rank from the mean of all) after each step."""
    vectors = torch.stack([values for *_, values in results]).double()
    distances = (vectors - vectors.mean(0)).norm(dim=-1).amax(0)
    times = [max(result[2][k] for result in results) for k in range(len(results[0][2]))]
    begin = results[0][0]
    return [(0.0, 0.0), *((t - begin, float(d)) for t, d in zip(times, distances, strict=True))]


def rows_of(results: VirtualResults, heading: str) -> list[Row]:
    """A row for each rank."""
    begin, rows = results[0][0], []
    spans = spans_of(results.logs)
    for rank in range(len(results)):
        mine = [s for s in spans if s.rank == rank and (s.label or s.lane == "communication")]
        bars = [_bar(s, begin) for s in mine]
        rows.append(Row(f"rank {rank}", [bars], heading="" if rank else heading))
    return rows


def _bar(span: Span, begin: float) -> Bar:
    looks = span.name if span.name in ("compute", "wait") else "collective"
    return Bar(span.start - begin, span.end - begin, looks, span.label)


def recorded(ranks: int, every: int, synchronous: VirtualResults) -> Scene:
    """The scene of both trainings on one axis of time."""
    local = run(ranks, every)
    both = {"DDP": synchronous, f"local SGD, H = {every}": local}
    rows = [row for name, results in both.items() for row in rows_of(results, name)]
    end = max(results.clock - results[0][0] for results in both.values())
    drifts = {"rank0": drift_of(synchronous), "rank5": drift_of(local)}
    top = max(value for curve in drifts.values() for _, value in curve) or 1.0
    marks = [(top, f"{top:.2g}")]
    panel = Panel("drift: the farthest rank from the mean", drifts, top, marks, height=70)
    texts = [
        ("ddp", "DDP: steps"),
        ("local", "local SGD: steps"),
        ("drift", "drift now"),
        ("time", "time"),
    ]
    made = Timeline(rows, _moments(both, drifts, every), 0.0, end, [], panel, texts, LEGEND)
    scene = scene_of_timeline(made)
    scene.ended = {
        "time": duration(max(r[1] - r[0] for results in both.values() for r in results)),
        "ddp": str(len(synchronous[0][2])),
        "local": str(len(local[0][2]) // 2),
        "drift": f"{float((local[0][3][-1] - local[-1][3][-1]).norm()):.2g}",
    }
    return scene


def _moments(
    both: dict[str, VirtualResults], drifts: dict[str, list[tuple[float, float]]], every: int
) -> list[Moment]:
    """A step whenever one of the trainings has ended a step on all ranks."""
    done = []
    for name, results in both.items():
        begin, per_step = results[0][0], len(results[0][2]) // STEPS
        for step in range(STEPS):
            last = max(result[2][(step + 1) * per_step - 1] for result in results)
            done.append((last - begin, name, step))
    counts = dict.fromkeys(both, 0)
    first, second = both
    moments = [
        Moment(
            0.0,
            "Start: both trainings have the same model, data and speed. Their messages differ.",
            {"ddp": "0", "local": "0", "drift": "0", "time": "0 µs"},
        )
    ]
    for moment, name, step in sorted(done):
        counts[name] += 1
        drift = [value for t, value in drifts["rank5"] if t <= moment + 1e-9][-1]
        texts = {
            "ddp": str(counts[first]),
            "local": str(counts[second]),
            "drift": f"{drift:.2g}",
            "time": duration(moment),
        }
        moments.append(Moment(moment, _said(name, step, every), texts))
    return moments


def _said(name: str, step: int, every: int) -> str:
    if name == "DDP":
        return f"DDP has done step {step}: an all-reduce of the gradients, and all wait for it."
    if (step + 1) % every:
        left = every - (step + 1) % every
        return f"Local SGD has done step {step} without a message; {several(left, 'step')} to go."
    return f"Local SGD has done step {step}, the last of a round: an all-reduce of the models."


def player() -> dict[str, Any]:
    """With ranks and length of a round to choose."""
    scenes: dict[tuple[str, ...], Scene] = {}
    for ranks in RANKS:
        synchronous = run(ranks, 0)
        for every in EVERY:
            scenes[str(ranks), str(every)] = recorded(ranks, every, synchronous)
    choices = [
        Choice("ranks", tuple(map(str, RANKS))),
        Choice("steps in a round (H)", tuple(map(str, EVERY))),
    ]
    return document(
        "Local SGD beside DDP",
        "Eight steps on a slow link (100 Mb/s, 5 ms). DDP sends in every step, local SGD once in H "
        "steps; in between its ranks drift apart.",
        choices,
        scenes,
        ("4", "4"),
    )
