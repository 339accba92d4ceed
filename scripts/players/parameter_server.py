"""The player of a parameter server with a slow worker: synchronous, asynchronous, bounded.

Server, workers, model and digits are real; what a gradient takes is given, so that pictures are
the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from distlab.player.scene import Choice, Scene, document
from distlab.player.timeline import Arrow, Bar, Moment, Row, Timeline, scene_of_timeline
from distlab.player.words import duration, several
from distlab.ranks.context import RankContext
from distlab.reference.workloads import build_model, digits
from distlab.virtual.reports import VirtualResults
from distlab.virtual.run import run_virtual

from .collectives import module_of

LONG, BATCH, RATE = 0.1, 32, 0.1  # seconds in which workers begin gradients; samples; lr
WORKERS = (2, 3)
FAST, SLOW = 0.010, 0.026  # seconds of a gradient; the last worker is the slow one
MODES: dict[str, Callable[[Any, Any], object]] = {
    "synchronous": lambda module, server: module.serve_synchronous(server),
    "asynchronous": lambda module, server: module.serve_asynchronous(server),
    "bounded, staleness 1": lambda module, server: module.serve_bounded(server, 1),
}
LEGEND = [
    ("forward", "computes a gradient, with the version that it pulled"),
    ("wait", "pulls, or waits for an answer"),
    ("optimizer", "an update on the server, with its version"),
]


def body(ctx: RankContext, mode: str) -> list[Any]:
    """Rank 0 serves, the others train; what happened: begins, ends and versions."""
    module, client_module = module_of(3, "parameter_server"), module_of(3, "parameter_client")
    model = build_model("mlp", 0)
    keys = dict(model.named_parameters())
    ctx.start_picture()
    if ctx.rank == 0:
        return serve(module, keys, mode)
    images, labels = digits()[ctx.rank :: ctx.world_size]
    client = client_module.Client(keys, servers=1)
    slow = ctx.rank == ctx.world_size - 1
    happened: list[list[float]] = []
    until = time.monotonic() + LONG
    while (asked := time.monotonic()) < until:
        values = client.pull(keys)
        pulled = time.monotonic()
        with torch.no_grad():
            for name, p in keys.items():
                p.copy_(values[name])
        model.zero_grad()
        chosen = slice(BATCH * len(happened), BATCH * (len(happened) + 1))
        time.sleep(SLOW if slow else FAST)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        computed = time.monotonic()
        client.push({name: p.grad for name, p in keys.items()}, BATCH)
        happened.append([asked, pulled, computed, time.monotonic(), client.versions[0]])
    client.leave()
    return [happened, time.monotonic(), client.clock]


def serve(module: Any, keys: dict[str, Any], mode: str) -> list[Any]:
    """The server, and when which workers' pushes made which version."""
    server = module.Server(keys, servers=1, lr=RATE)
    happened: list[list[Any]] = []
    update = server.update

    def noted(pushes: list[Any]) -> None:
        update(pushes)
        if pushes:
            happened.append([time.monotonic(), server.version, [p.worker for p in pushes]])

    server.update = noted
    MODES[mode](module, server)
    return [happened, time.monotonic(), server.version]


def recorded(mode: str, workers: int) -> Scene:
    """The scene of one training."""
    results = run_virtual(body, workers + 1, mode, cluster="ethernet-v100")
    updates, _, version = results[0]
    begin = min(happened[0][0] for happened, *_ in results[1:])
    end = max(done for _, done, _ in results)
    mark = (end - begin) / 25
    rows = [Row("server", [_versions(updates, mark)], "version", 3)]
    arrows = []
    for worker in range(1, workers + 1):
        bars = []
        for asked, pulled, computed, pushed, had in results[worker][0]:
            bars.append(Bar(asked, pulled, "wait", "wait"))
            bars.append(Bar(pulled, pushed, "forward", f"v{had}"))
            arrows.append(Arrow(worker, computed, 0, pushed))
        rows.append(Row(f"worker {worker}", [bars], f"clock {worker}", 9))
    moments = _moments(results, begin, end)
    texts = [("time", "time"), ("oldest", "oldest used")]
    made = Timeline(rows, moments, begin, end, arrows, None, texts, LEGEND)
    scene = scene_of_timeline(made)
    scene.ended = {"time": duration(end - begin), "version": f"v{version}"}
    scene.ended |= {f"clock {w}": several(results[w][2], "push") for w in range(1, workers + 1)}
    return scene


def _versions(updates: list[list[Any]], mark: float) -> list[Bar]:
    """A box at each update, as wide as there is room."""
    ends = [min(now[0] + mark, later[0]) for now, later in pairwise(updates)]
    ends.append(updates[-1][0])
    return [
        Bar(now, max(end, now), "optimizer", f"v{version}")
        for (now, version, _), end in zip(updates, ends, strict=True)
    ]


def _moments(results: VirtualResults, begin: float, end: float) -> list[Moment]:
    """A step for each update of the server."""
    workers = range(1, len(results))
    counts = dict.fromkeys(workers, 0)
    start = {f"clock {worker}": "0 pushes" for worker in workers}
    start |= {"version": "v0", "time": "0 µs", "oldest": "–"}
    say = f"Start: the server holds version 0; worker {workers[-1]} is slow."
    moments, oldest = [Moment(begin, say, start)], 0
    for now, version, pushed in results[0][0]:
        ages = []
        for worker in pushed:
            had = int(results[worker][0][counts[worker]][4])
            ages.append(version - 1 - had)
            counts[worker] += 1
        oldest = max(oldest, *ages)
        texts = {f"clock {worker}": several(counts[worker], "push") for worker in pushed}
        texts |= {"version": f"v{version}", "time": duration(now - begin)}
        texts |= {"oldest": several(oldest, "version")}
        moments.append(Moment(now, _said(pushed, version, ages), texts))
    done = f"All workers have left: {several(sum(counts.values()), 'gradient')} were used."
    return [*moments, Moment(end, done, {"time": duration(end - begin)})]


def _said(pushed: list[int], version: int, ages: list[int]) -> str:
    if len(pushed) > 1:
        return (
            f"All {len(pushed)} workers have pushed: the mean of their gradients makes version "
            f"{version}. All of them wait for the slowest."
        )
    age = f"{several(ages[0], 'version')} old" if ages[0] else "up to date"
    return f"Worker {pushed[0]} pushes; its gradient, {age}, makes version {version} at once."


def player() -> dict[str, Any]:
    """With mode and workers to choose."""
    scenes: dict[tuple[str, ...], Scene] = {
        (mode, str(count)): recorded(mode, count) for mode in MODES for count in WORKERS
    }
    choices = [
        Choice("server", tuple(MODES)),
        Choice("workers", tuple(map(str, WORKERS))),
    ]
    return document(
        "Parameter server with a slow worker",
        "Workers pull parameters, compute a gradient and push it. The last worker is slow. Compare "
        "who waits, and how old the gradients are.",
        choices,
        scenes,
        ("asynchronous", "3"),
    )
