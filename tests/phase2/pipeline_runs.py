"""Runs that the checks of several pipeline exercises share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distlab.grading import expect_equal, fail
from distlab.ranks.context import RankContext
from tests.phase2.pipeline_orders import Steps, bubble, peaks, placement, problem_of
from tests.phase2.pipelines import (
    STALE,
    Meter,
    Paced,
    batch,
    boundaries,
    calls_of,
    compare,
    cut,
    gradients,
    layers,
    one_process,
    paced_batch,
    paced_boundaries,
    squares,
    stale_of,
)

PER = 3  # samples per micro-batch
UNIT = 0.02  # virtual seconds of a forward
Make = Callable[[Any], Any]  # the implementation to a schedule


def class_named(impl: Any, name: str) -> Any:
    """A class of the module under test, or of another one: ``"zero_bubble.ZeroBubblePipeline"``."""
    module, _, kind = name.rpartition(".")
    return getattr(impl.module(module) if module else impl, kind)


def check_run(
    run: Any,
    impl: Any,
    seed: int,
    ranks: int,
    m: int,
    schedule: Make,
    *,
    chunks: int = 1,
    frozen: bool | str = False,
    steps: int = 1,
    kind: str = "",
    pipeline: str = "Pipeline",
) -> None:
    """Gradients and loss of a run are those of one process; ``schedule(module)`` makes it.

    ``kind``: the placement of stages, if it is not in turn; ``steps``: calls without clearing.
    """
    rank_of = placement(kind or "round", ranks, chunks)

    def body(ctx: RankContext) -> tuple[dict[str, Tensor], list[float], set[int], set[float]]:
        found = [layer.to(ctx.device) for layer in layers(seed, frozen)]
        parts = cut(found, ranks * chunks)
        x, y = (t.to(ctx.device) for t in batch(seed, m * PER))
        mine = [part for part, rank in zip(parts, rank_of, strict=True) if rank == ctx.rank]
        shapes = boundaries(parts, x[:PER])
        for module in (each for part in mine for each in part.modules()):
            module.calls = 0
        if ctx.rank != rank_of[0]:
            x = torch.zeros_like(x)  # only the first stage reads the inputs
        if ctx.rank != rank_of[-1]:
            y = torch.zeros_like(y)
        runs = class_named(impl, pipeline)(mine, schedule(impl), F.cross_entropy, shapes)
        losses = [runs.step(x, y) for _ in range(steps)]
        return gradients(found, mine), losses, calls_of(mine), stale_of(mine)

    results = run(body, ranks)
    for rank, (_, _, calls, stale) in enumerate(results):
        if calls - {m * steps}:
            text = f"a stage was called {calls} times for {m * steps} micro-batches"
            fail(text, cause="called-again", rank=rank)
        if stale - {STALE}:
            text = f"a frozen parameter had the gradient {STALE}, now it has {stale}"
            fail(text, cause="frozen", rank=rank)
    results = [(got, loss_of(losses)) for got, losses, *_ in results]
    parts, loss = one_process(seed, m * PER, m, frozen=frozen)
    stages = f", {chunks} stages each" if chunks > 1 else ""
    compare(results, parts, loss, f"{ranks} ranks{stages}, {m} micro-batches", times=steps)


def loss_of(losses: list[Any]) -> Any:
    """What all steps returned, or NaN if they differ."""
    if len(losses) == 1:
        return losses[0]
    same = all(isinstance(loss, float) for loss in losses) and len(set(losses)) == 1
    return losses[-1] if same else math.nan


def check_order(order: Steps, schedule: Steps, stages: int, m: int, what: str) -> None:
    """The schedule is complete and can run, and its compute steps are the order's."""
    cause, text = problem_of(schedule, stages, m)
    if cause:
        fail(f"{what}: {text}", cause=cause)
    compute = [[step for step in steps if len(step[0]) == 1] for steps in schedule]
    expect_equal(compute, order, what=f"{what}: compute steps of the schedule", cause="order")


def check_bubble(order: Steps, costs: Sequence[dict[str, float]], want: float, what: str) -> None:
    """The idle share in theory is at most ``want``."""
    for each in costs:
        got = bubble(order, each)
        if got > want + 1e-9:
            text = f"{what}: the bubble is {got:.3f} of the time with costs {each}, "
            fail(f"{text}{want:.3f} can be had", cause="bubble")


def check_peaks(order: Steps, limits: Sequence[int], what: str) -> None:
    """No rank keeps more than its limit."""
    for rank, (got, limit) in enumerate(zip(peaks(order), limits, strict=True)):
        if got > limit:
            text = f"{what}: rank {rank} keeps {got} activations at its peak, {limit} are enough"
            fail(text, cause="too-many-kept", rank=rank)


def check_executed(
    run: Any,
    impl: Any,
    make: Make,
    ranks: int,
    m: int,
    chunks: int,
    seconds: float,
    limits: Sequence[int],
    pipeline: str = "Pipeline",
) -> None:
    """A run with stages of equal speed takes ``seconds`` and keeps no more than ``limits``.

    F, B (of the input) and W of all of a rank's stages together take ``UNIT`` seconds each.
    """

    def body(ctx: RankContext) -> list[float]:
        meter = Meter()
        stages = [Paced((UNIT / chunks,) * 3, meter) for _ in range(chunks)]
        shapes = paced_boundaries(ranks * chunks)
        runs = class_named(impl, pipeline)(stages, make(impl), squares, shapes)
        begin = time.perf_counter()
        runs.step(*paced_batch(m))
        return [time.perf_counter() - begin, meter.peak, meter.live]

    results = run.simulate(body, ranks, cluster="dgx-h100")
    what = f"{ranks} ranks, {m} micro-batches" + (f", {chunks} stages each" if chunks > 1 else "")
    work = 3 * m * UNIT
    for rank, ((took, peak, live), limit) in enumerate(zip(results, limits, strict=True)):
        if abs(took - seconds) > 1e-3 * seconds:
            text = (
                f"{what}: the step took {took / UNIT:.2f} times a forward in virtual time, in "
                f"theory {seconds / UNIT:.2f}: a bubble of {1 - work / took:.1%}, not "
                f"{1 - work / seconds:.1%}"
            )
            fail(text, cause="slower" if took > seconds else "faster", rank=rank)
        if peak > limit:
            text = f"{what}: rank {rank} keeps {peak} forwards for backward at its peak"
            fail(f"{text}, {limit} are enough", cause="too-many-kept", rank=rank)
        if live:
            text = f"{what}: {live} forwards are still kept after the step"
            fail(text, cause="not-freed", rank=rank)


def paced_scenario(
    make: Make,
    ranks: int = 4,
    m: int = 8,
    chunks: int = 1,
    unit: float = 0.04,
    parts: tuple[int, int, int] = (1, 2, 0),
    kind: str = "Pipeline",
    shape: str = "round",
) -> Callable[[Any], Callable[[RankContext], None]]:
    """A body that runs ``make(impl)`` with stages that sleep: F, B and W take ``parts`` units.

    ``shape``: the placement of stages.
    """
    forward, backward, weights = (unit * part / chunks for part in parts)

    def scenario(impl: Any) -> Callable[[RankContext], None]:
        def body(ctx: RankContext) -> None:
            rank_of = placement(shape, ranks, chunks)
            mine = [stage for stage, rank in enumerate(rank_of) if rank == ctx.rank]
            names = [f"{stage}." if chunks > 1 else "" for stage in mine]
            seconds = (forward, backward, weights)
            stages = [Paced(seconds, span=ctx.span, stage=name) for name in names]
            shapes = paced_boundaries(ranks * chunks)
            pipeline = class_named(impl, kind)(stages, make(impl), squares, shapes)
            pipeline.step(*paced_batch(m))  # the first opens connections
            dist.barrier()
            ctx.start_picture()
            pipeline.step(*paced_batch(m))

        return body

    return scenario
