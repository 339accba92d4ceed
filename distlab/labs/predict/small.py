"""Predictions for small messages: metrics, timings, and one number for all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from given.step_metrics import RankMetrics

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import MODEL, drawn, gradients, layers, model_bytes
from .scene import (
    Found,
    Prepare,
    Quantity,
    Scene,
    Work,
    bytes_sent,
    clocked,
    collectives,
    half_seconds,
    held,
    ring_seconds,
)

METRICS, NUMBER, LOSS = 24, 8, 16  # bytes
REPORT = 104  # bytes of a rank's report


def _ring_bytes(case: Case, nbytes: float) -> float:
    return 2 * (case["W"] - 1) / case["W"] * nbytes


def _trained(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, case["D"]), torch.zeros(2, dtype=torch.int64)

    def work() -> None:
        for _ in range(case["steps"]):
            impl.train_step(model, optimizer, *batch)

    return work


def _metrics(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    return lambda: impl.global_metrics(1.0, 1, case["samples"]) and None


def _timed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    tensor = torch.ones(case["n"])
    times = {"warmup": case["u"], "repeats": case["r"]}
    return lambda: impl.time_collective(lambda: dist.all_reduce(tensor), **times) and None


def _scaled(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    gradients(model)
    scaler = impl.LossScaler(scale=256.0, growth_interval=case["g"])

    def work() -> Found:
        for _ in range(case["steps"]):
            scaler.unscale(model.parameters())
            scaler.update()
        return {"scale": float(scaler.scale)}

    return work


def _budget(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    return lambda: impl.smallest_budget(case["own"] + ctx.rank) and None


def _reported(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    names = [field.name for field in dataclasses.fields(RankMetrics) if field.name != "phases"]
    phases = (0.0,) * (REPORT // NUMBER - len(names))
    mine = RankMetrics(**dict.fromkeys(names, 0.0), phases=phases)
    return lambda: impl.metrics_of_all(mine) and None


def _asked(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    guard = impl.PreemptionGuard()

    def work() -> Found:
        for _ in range(case["steps"]):
            guard.agreed()
        return {"interval": _best_interval(case)}

    return work


def _best_interval(case: Case) -> float:
    """The seconds between saves that lose least, found by trying all."""
    save, between = case["s"], case["F"]
    return float(min(range(1, between), key=lambda t: save / t + t / (2 * between)))


def _one(nbytes: int, times: str = "") -> tuple[Quantity, ...]:
    """One small all-reduce, ``times`` over: its bytes and its time."""
    often = f"{times}·" if times else ""

    def count(case: Case) -> int:
        return case[times] if times else 1

    return (
        bytes_sent(
            lambda c: count(c) * _ring_bytes(c, nbytes),
            f"{often}2(W-1)/W·{nbytes}",
            tolerance=0.2,
            why="20 %: so few bytes can't be cut into W equal parts",
        ),
        clocked(
            lambda c: count(c) * ring_seconds(c, nbytes),
            formula=f"{often}(launch + 2(W-1)·(α + {nbytes}/W·β))",
        ),
    )


def _scene(
    exercise: str, tells: str, prepare: Prepare, doubled: str, *quantities: Quantity, **more: Any
) -> Scene:
    return Scene(
        exercise=exercise,
        tells=tells,
        draw=more.pop("draw", None) or draws(exercise, **more),
        prepare=prepare,
        quantities=quantities,
        doubled=doubled,
    )


LATENCY = "The bytes stay below twice the numbers; the latency doubles, and it is nearly all."

SCENES = (
    _scene(
        "1.5",
        f"{MODEL}. They train {{steps}} steps. A step averages the gradients, and the loss.",
        _trained,
        "The bytes per rank stay below 2P per step; the latency of a ring doubles.",
        bytes_sent(
            lambda c: c["steps"] * _ring_bytes(c, model_bytes(c) + LOSS),
            f"steps·2(W-1)/W·(P + {LOSS})",
            tolerance=0.02,
            why="2 %: counts of samples travel, too",
        ),
        draw=lambda random_: drawn("1.5", random_, steps=[2, 3, 5]),
    ),
    _scene(
        "1.6",
        "W = {W} ranks evaluate {samples:,} samples each: sum of losses, right answers and samples "
        "are float64.",
        _metrics,
        LATENCY,
        *_one(METRICS),
        samples=[100, 5000, 1_000_000],
    ),
    _scene(
        "1.9",
        "W = {W} ranks time an all-reduce of {n:,} float32 numbers: {u} runs to warm up, {r} timed "
        "ones.",
        _timed,
        "The same collectives; each takes longer, so the measurement does, too.",
        collectives(
            lambda c: c["u"] + 2 * c["r"] + 1,
            "warmup + 2·repeats + 1: a barrier before each timed run, and the slowest rank's times",
            asks="collectives that a rank calls, barriers too",
            answers={
                "ledger": lambda seen: max(len(log.events) for log in seen.logs),
                "clock": lambda seen: seen.calls,
            },
        ),
        bytes_sent(
            lambda c: _ring_bytes(c, (c["u"] + c["r"]) * 4 * c["n"] + 8 * c["r"]),
            "2(W-1)/W·((warmup + repeats)·4n + 8·repeats)",
        ),
        n=[8400, 84_000],
        u=[1, 2, 3],
        r=[3, 5, 10],
    ),
    _scene(
        "2.6",
        f"{MODEL}. They unscale {{steps}} times, and no gradient overflows. The scale begins at "
        "256, and doubles after {g} steps in a row without an overflow.",
        _scaled,
        LATENCY,
        held(
            "scale",
            lambda c: 256.0 * 2 ** (c["steps"] // c["g"]),
            "256·2^⌊steps/g⌋",
            asks="the scale at the end",
            unit="times",
            by="state",
        ),
        *_one(4, "steps"),
        draw=lambda random_: drawn("2.6", random_, steps=[4, 6, 9], g=[2, 3, 4]),
    ),
    _scene(
        "3.21",
        "W = {W} ranks agree on the least memory that any of them has free.",
        _budget,
        LATENCY,
        *_one(NUMBER),
        own=[10**9, 8 * 10**9],
    ),
    _scene(
        "4.11",
        "W = {W} ranks exchange their reports on a window of steps: 13 float64 numbers each.",
        _reported,
        "A rank sends twice as many bytes, as all reports go to all.",
        bytes_sent(lambda c: (c["W"] - 1) * REPORT, f"(W-1)·{REPORT}"),
        clocked(
            lambda c: half_seconds(c, c["W"] * REPORT),
            formula=f"launch + (W-1)·(α + {REPORT}·β)",
        ),
    ),
    _scene(
        "4.14",
        "W = {W} ranks train {steps} steps, and ask after each whether one of them must leave. A "
        "save stops training for s = {s} s. The job fails every F = {F:,} s in the mean.",
        _asked,
        "F halves, as twice as many machines fail twice as often: save more often by √2.",
        held(
            "interval",
            lambda c: (2 * c["s"] * c["F"]) ** 0.5,
            "√(2·s·F)",
            asks="seconds between two saves that lose least time",
            unit="seconds",
            tolerance=0.02,
            why="2 %: the search tries whole seconds",
            by="search",
        ),
        *_one(4, "steps"),
        steps=[5, 10, 20],
        s=[5, 20, 60],
        F=[3600, 21_600, 86_400],
    ),
)
