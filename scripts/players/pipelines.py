"""The player of pipeline schedules: stages that sleep, run by the solutions on virtual ranks."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from distlab.hardware.clusters import Link, load_cluster
from distlab.picture import Span, covered, spans_of
from distlab.player.scene import Choice, Scene, document
from distlab.player.timeline import Bar, Moment, Row, Timeline, scene_of_timeline
from distlab.player.words import duration, several
from distlab.ranks.context import RankContext
from distlab.virtual.run import run_virtual
from tests.phase2.pipelines import Meter, Paced, paced_batch, paced_boundaries, squares

from .collectives import module_of

UNIT = 0.01  # seconds of a forward of all stages of a rank
RANKS = (2, 4)
BATCHES = (4, 8)
SCHEDULES = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved 1F1B": "interleaved", "zero bubble": ""}
WORDS = {"forward": "forward", "backward": "backward", "weights": "gradient of the weights"}
LEGEND = [("forward", "forward"), ("backward", "backward"), ("weights", "gradient of the weights")]


def body(ctx: RankContext, schedule: str, m: int) -> list[Any]:
    """One step of the solution's pipeline; begin, end, most activations kept, and those left."""
    module = module_of(2, "pipeline_parallel" if schedule else "zero_bubble")
    chunks = 2 if schedule == "interleaved" else 1
    parts = (1.0, 2.0, 0.0) if schedule else (1.0, 1.0, 1.0)
    ranks, meter = ctx.world_size, Meter()
    stages = [
        Paced(
            (parts[0] * UNIT / chunks, parts[1] * UNIT / chunks, parts[2] * UNIT / chunks),
            meter,
            ctx.span,
            f"{chunk * ranks + ctx.rank}." if chunks > 1 else "",
        )
        for chunk in range(chunks)
    ]
    if schedule:
        steps, kind = module.make_schedule(schedule, ranks, m, chunks), module.Pipeline
    else:
        schedules = module_of(2, "pipeline_schedules")
        steps = schedules.with_messages(module.zero_bubble(ranks, m))
        kind = module.ZeroBubblePipeline
    pipeline = kind(stages, steps, squares, paced_boundaries(ranks * chunks))
    dist.barrier()
    ctx.start_picture()
    begin = time.monotonic()
    pipeline.step(*paced_batch(m))
    return [begin, time.monotonic(), meter.peak, meter.live]


def recorded(name: str, ranks: int, m: int) -> Scene:
    """The scene of one run, on links that take next to nothing."""
    fast = Link(alpha=1e-9, bandwidth=1e15)
    cluster = dataclasses.replace(load_cluster("dgx-h100"), inside=fast, gpus_per_node=ranks)
    results = run_virtual(body, ranks, SCHEDULES[name], m, cluster=cluster)
    spans = [span for span in spans_of(results.logs) if span.label]
    begin = min(b for b, *_ in results)
    end = max(e for _, e, *_ in results)
    rows = [
        Row(f"rank {rank}", [[_bar(s) for s in spans if s.rank == rank]], f"kept {rank}", 7)
        for rank in range(ranks)
    ]
    moments = _moments(spans, ranks, begin)
    below = [("time", "time"), ("bubble", "idle (bubble)")]
    made = Timeline(rows, moments, begin, end, texts=below, legend=_legend(spans))
    scene = scene_of_timeline(made)
    work = sum(span.seconds for span in spans)
    scene.ended = {"time": duration(round(end - begin, 6))}
    scene.ended["bubble"] = f"{1 - work / (ranks * (end - begin)):.0%}"
    scene.ended |= {f"kept {rank}": f"{live} kept" for rank, (*_, live) in enumerate(results)}
    for rank, (_, _, peak, _) in enumerate(results):
        shown = [
            int(m.texts[f"kept {rank}"].split()[0]) for m in moments if f"kept {rank}" in m.texts
        ]
        assert max(shown) == peak or not SCHEDULES[name], (
            "kept for the weights: the meter can't see"
        )
    return scene


def _legend(spans: Sequence[Span]) -> list[tuple[str, str]]:
    names = {span.name for span in spans}
    return [(looks, words) for looks, words in LEGEND if looks in names]


def _bar(span: Span) -> Bar:
    return Bar(span.start, span.end, span.name, span.label.rpartition(".")[2])


def _moments(spans: Sequence[Span], ranks: int, begin: float) -> list[Moment]:
    """A step for each time in which all ranks do one thing."""
    start = "Start. A number is a micro-batch. Kept: activations that wait for backward."
    empty = {f"kept {rank}": "0 kept" for rank in range(ranks)}
    moments = [Moment(begin, start, {**empty, "time": "0 µs", "bubble": "0%"})]
    ends = sorted({round(t, 7) for s in spans for t in (s.start, s.end)})
    frees = "weights" if any(s.name == "weights" for s in spans) else "backward"
    for before, now in zip([begin, *ends], ends, strict=False):
        if now - before < UNIT / 10:
            continue
        doing = {s.rank: s for s in spans if s.start < now - 1e-6 and s.end > before + 1e-6}
        kept = Counter(s.rank for s in spans if s.name == "forward" and s.end <= now + 1e-6)
        kept.subtract(s.rank for s in spans if s.name == frees and s.end <= now + 1e-6)
        busy = sum(covered(_until(spans, rank, now)) for rank in range(ranks))
        idle = 1 - busy / (ranks * (now - begin))
        texts = {f"kept {rank}": f"{kept[rank]} kept" for rank in range(ranks)}
        changed = {k: v for k, v in texts.items() if _known(moments, k) != v}
        more = {"time": duration(round(now - begin, 6)), "bubble": f"{idle:.0%}"}
        moments.append(Moment(now, _said(doing, ranks), changed | more))
    return moments


def _known(moments: Sequence[Moment], name: str) -> str:
    return next(m.texts[name] for m in reversed(moments) if name in m.texts)


def _until(spans: Sequence[Span], rank: int, moment: float) -> list[Span]:
    mine = [s for s in spans if s.rank == rank and s.start < moment]
    return [dataclasses.replace(s, end=min(s.end, moment)) for s in mine]


def _said(doing: dict[int, Span], ranks: int) -> str:
    """Who computes what, the first and the last in full."""
    waiting = ranks - len(doing)
    shown = [doing[rank] for rank in sorted(doing)]
    if len(shown) > 3:
        shown = [shown[0], shown[-1]]
    told = [f"rank {s.rank}: {WORDS[s.name]} of {_what(s)}" for s in shown]
    idle = f"{several(waiting, 'rank')} idle" if waiting else "no rank is idle"
    return f"{several(len(doing), 'rank')} compute{'s' if len(doing) == 1 else ''}, {idle}. " + (
        "; ".join(told).capitalize() + "."
    )


def _what(span: Span) -> str:
    stage, dot, batch = span.label.rpartition(".")
    return f"micro-batch {batch}" + (f" in stage {stage}" if dot else "")


def player() -> dict[str, Any]:
    """With schedule, ranks and micro-batches to choose."""
    scenes: dict[tuple[str, ...], Scene] = {
        (name, str(ranks), str(m)): recorded(name, ranks, m)
        for name in SCHEDULES
        for ranks in RANKS
        for m in BATCHES
    }
    choices = [
        Choice("schedule", tuple(SCHEDULES)),
        Choice("ranks", tuple(map(str, RANKS))),
        Choice("micro-batches", tuple(map(str, BATCHES))),
    ]
    return document(
        "Pipeline schedules",
        "Each rank computes its stage for one micro-batch after the other. Gaps are the bubble. A "
        "backward takes as long as two forwards.",
        choices,
        scenes,
        ("1F1B", "4", "8"),
    )
