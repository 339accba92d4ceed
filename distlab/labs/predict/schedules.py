"""Predictions for pipelines, and stages that take their time."""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...grading.implementation import Implementation
from ...observe.log import Log
from ...ranks.context import RankContext
from .case import Case, machine_of
from .models import FLOAT
from .scene import (
    Found,
    Quantity,
    Scene,
    Seen,
    Work,
    clocked,
)

MILLI = 1e-3
LEFT_OUT: dict[str, Any] = {
    "tolerance": 0.03,
    "why": "3 %: the formula leaves the messages' time out",
}
WIDE = 64  # numbers in an activation of a pipeline's micro-batch


class _Busy(torch.autograd.Function):
    """The same values; both ways take their time, and what is kept for backward is counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: PacedStage) -> Tensor:
        """Sleeps, and keeps a marker until backward."""
        ctx.stage = stage
        marker = torch.empty(1)
        ctx.save_for_backward(marker)
        stage.kept.add(marker)
        stage.take("forward", 1)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Sleeps twice as long."""
        ctx.stage.take("backward", 2)
        return gradients[0], torch.ones(()), None


class Kept:
    """How many forwards of a rank are kept for backward, and the most there were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, marker: Tensor) -> None:
        """Count until ``marker`` is freed."""
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(marker, self._gone)

    def _gone(self) -> None:
        self.now -= 1


class PacedStage(nn.Module):
    """A stage whose forward takes ``seconds``, its backward twice as long."""

    def __init__(self, ctx: RankContext, seconds: float, kept: Kept) -> None:
        super().__init__()
        self.ctx, self.seconds, self.kept = ctx, seconds, kept
        self.weight = nn.Parameter(torch.ones(()))

    def take(self, name: str, units: int) -> None:
        """Some time of work."""
        with self.ctx.span(name) if self.ctx.ledger else contextlib.nullcontext():
            time.sleep(units * self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        out: Tensor = _Busy.apply(x, self.weight, self)
        return out


def _pipeline(ctx: RankContext, impl: Implementation, case: Case, schedule: str) -> Work:
    chunks, ranks, m = case["v"], case["W"], case["m"]
    kept = Kept()
    stages = [PacedStage(ctx, case["t"] * MILLI / chunks, kept) for _ in range(chunks)]
    boundaries = [torch.empty(1, WIDE, device="meta")] * (ranks * chunks - 1)
    planned = impl.make_schedule(schedule, ranks, m, chunks)
    runs = impl.Pipeline(stages, planned, nn.functional.mse_loss, boundaries)
    inputs, targets = torch.ones(m, WIDE), torch.zeros(m, WIDE)

    def work() -> Found:
        begin = time.monotonic()
        runs.step(inputs, targets)
        took = time.monotonic() - begin
        busy = 3 * m * case["t"] * MILLI
        return {"bubble": 1 - busy / took, "kept": float(kept.peak)}

    return work


def _draw_pipeline(exercise: str, chunks: list[int]) -> Any:
    def draw(random_: random.Random) -> Case:
        cluster, spread = machine_of(random_)
        p, v = random_.choice([2, 3, 4, 6]), random_.choice(chunks)
        m = p * random_.randint(1, 4) if v > 1 else random_.randint(2, 16)
        sizes = {"W": p, "m": m, "v": v, "t": random_.choice([10, 20, 50])}
        return Case(exercise, cluster, sizes, spread)

    return draw


def _sends(log: Log) -> int:
    return len(log.select("send").events)


def _over_links(seen: Seen) -> float:
    """Activations and gradients by the bytes that the links have carried."""
    traffic = seen.real.traffic
    nbytes = WIDE * FLOAT
    return float(traffic["out"] // nbytes)


def idle(seen: Seen) -> float:
    """The share of the ranks' time that is no span of the ledger."""
    logs = seen.real.logs
    spans = [(end - start) for log in logs for name, start, end in log.spans if "ward" in name]
    return 1 - sum(spans) / (len(logs) * seen.seconds)


def span_time(seen: Seen) -> float:
    """From the first span of the ledger to the end of the last one."""
    spans = [span for log in seen.real.logs for span in log.spans if "ward" in span[0]]
    return max(end for _, _, end in spans) - min(start for _, start, _ in spans)


def _bubble(case: Case) -> float:
    return (case["W"] - 1) / (case["v"] * case["m"] + case["W"] - 1)


def _step(case: Case) -> float:
    return (case["m"] + (case["W"] - 1) / case["v"]) * 3 * case["t"] * MILLI


def _kept(case: Case, schedule: str) -> int:
    p, m, v = case["W"], case["m"], case["v"]
    if schedule == "gpipe":
        return m
    return min(m, p) if schedule == "1f1b" else min(v * m, 2 * (p - 1) + (v - 1) * p + 1)


def _scheduled(exercise: str, schedule: str, chunks: list[int], kept: str) -> Scene:
    stage = " v = {v} stages each," if chunks != [1] else ""
    quantities: tuple[Quantity, ...] = (
        Quantity(
            name="all_messages",
            asks="messages of all ranks with an activation or its gradient",
            unit="messages",
            formula="2m(v·p - 1)" if stage else "2m(p-1)",
            value=lambda c: 2 * c["m"] * (c["v"] * c["W"] - 1),
            answers={"ledger": lambda s: sum(map(_sends, s.logs)), "links": _over_links},
        ),
        Quantity(
            name="kept",
            asks="micro-batches whose activations the first rank keeps at most"
            + (", counted per stage" if stage else ""),
            unit="micro-batches",
            formula=kept,
            value=lambda c: _kept(c, schedule),
            answers={"memory": _kept_on_first},
        ),
        Quantity(
            name="bubble",
            asks="bubble: the idle share of the ranks' time (0 to 1)",
            unit="share",
            formula="(p-1)/(v·m + p-1)" if stage else "(p-1)/(m + p-1)",
            value=_bubble,
            answers={"ledger": idle, "clock": lambda s: s.found("bubble")},
            **LEFT_OUT,
        ),
        clocked(
            _step,
            formula="(m + (p-1)/v)·3t" if stage else "(m + p-1)·3t",
            asks="seconds of the step",
            answers={"ledger": span_time, "clock": lambda s: s.seconds},
            **LEFT_OUT,
        ),
    )
    return Scene(
        exercise=exercise,
        tells=f"p = {{W}} ranks run {schedule},{stage} m = {{m}} micro-batches. A rank's forward "
        "of a micro-batch takes t = {t} ms, its backward 2t, an activation has 256 bytes.",
        draw=_draw_pipeline(exercise, chunks),
        prepare=partial(_pipeline, schedule=schedule),
        quantities=quantities,
        doubled="With twice the ranks the bubble nearly doubles, unless m doubles, too.",
    )


def _kept_on_first(seen: Seen) -> float:
    return float(seen.real[0]["kept"])


SCENES = (
    _scheduled("2.10", "gpipe", [1], "m"),
    _scheduled("2.11", "1f1b", [1], "min(m, p)"),
    _scheduled("2.12", "interleaved", [2, 3], "min(v·m, 2(p-1) + (v-1)p + 1)"),
)
