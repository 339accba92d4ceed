"""Predictions for models divided over ranks, and for schedules as data."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import FLOAT, FROM_ROOT, layers
from .scene import Found, Prepare, Quantity, Scene, Work, bytes_sent, clocked, held
from .schedules import BUBBLE, LEFT_OUT, MILLI, WIDE, Kept, PacedStage, idle, span_time


def _split(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    stages = [PacedStage(ctx, case["t"] * MILLI, Kept()) for _ in range(case["W"])]
    stage = impl.Stage(stages, [*range(case["W"] + 1)])
    inputs, targets = torch.ones(case["B"], WIDE), torch.zeros(case["B"], WIDE)

    def work() -> Found:
        begin = time.monotonic()
        impl.forward_backward(stage, inputs, targets, nn.functional.mse_loss)
        return {"idle": 1 - 3 * case["t"] * MILLI / (time.monotonic() - begin)}

    return work


def _activation(case: Case) -> int:
    return case["B"] * WIDE * FLOAT


def _divided(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model, costs = [*layers(case)], [float(k + 1) for k in range(case["K"])]

    def work() -> Found:
        impl.measured_costs(model, torch.ones(2, case["D"]), repeats=1)
        bounds = impl.partition(costs, case["W"])
        return {"largest": max(sum(costs[begin:end]) for begin, end in pairwise(bounds))}

    return work


def _least_largest(case: Case) -> int:
    """The least limit that lets W stages, filled one after the other, hold 1 + 2 + … + K."""

    def stages(limit: int) -> int:
        count, filled = 1, 0
        for cost in range(1, case["K"] + 1):
            full = filled + cost > limit
            count, filled = count + full, cost if full else filled + cost
        return count

    return next(limit for limit in range(case["K"], case["K"] ** 2) if stages(limit) <= case["W"])


def _forwards_first(impl: Implementation, case: Case) -> list[list[Any]]:
    """Every rank's forwards, then its backwards, the newest first."""
    m = case["m"]
    return [
        [impl.Step("F", rank, i) for i in range(m)]
        + [impl.Step("B", rank, i) for i in reversed(range(m))]
        for rank in range(case["W"])
    ]


def sends(complete: list[list[Any]], order: list[list[Any]]) -> float:
    return (sum(map(len, complete)) - sum(map(len, order))) / 2


def _planned(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    order = _forwards_first(impl, case)

    def work() -> Found:
        complete = impl.with_messages(order)
        return {"all_messages": sends(complete, order), "steps": float(max(map(len, complete)))}

    return work


def _replayed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    order = _forwards_first(impl, case)

    def work() -> Found:
        run = impl.replay(order)
        kept = max(impl.peak_live(order))
        return {"kept": float(kept), "bubble": float(run.bubble), "units": float(run.seconds)}

    return work


def _without_bubble(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    schedules = impl.module("pipeline_schedules")

    def work() -> Found:
        order = impl.zero_bubble(case["W"], case["m"])
        bubble, kept = schedules.replay(order).bubble, schedules.peak_live(order)[0]
        crossing = sends(schedules.with_messages(order), order)
        return {"bubble": float(bubble), "kept": float(kept), "all_messages": crossing}

    return work


def _draw_zero(random_: random.Random) -> Case:
    case: Case = draws("2.13", [2, 3, 4, 6])(random_)
    sizes = case.sizes | {"m": case["W"] * random_.choice([1, 2, 4])}
    return Case(case.exercise, case.cluster, sizes, case.spread)


def of_schedule(name: str, value: Any, formula: str, **more: Any) -> Quantity:
    """Answered by the schedule itself, or its replay under a clock of its own."""
    by = "replay" if name in ("bubble", "units") else "schedule"
    return held(name, value, formula, by=by, **more)


MESSAGES = of_schedule(
    "all_messages",
    lambda c: 2 * c["m"] * (c["W"] - 1),
    "2m(p-1)",
    asks="messages of all ranks with an activation or its gradient",
    unit="messages",
)


def _scene(
    exercise: str, tells: str, draw: Any, prepare: Prepare, doubled: str, *quantities: Quantity
) -> Scene:
    return Scene(
        exercise=exercise,
        tells=tells,
        draw=draw,
        prepare=prepare,
        quantities=quantities,
        doubled=doubled,
    )


PLANNED = (
    "p = {W} ranks have a stage each. All m = {m} forwards of a rank come before its backwards"
)
M = [2, 4, 6, 8, 16]

SCENES = (
    _scene(
        "2.8",
        "A model is divided into one stage per rank, on W = {W} ranks. A stage's forward takes "
        "t = {t} ms, its backward 2t. An activation has {B} x 64 float32 numbers. "
        "Forward and backward run once.",
        draws("2.8", [3, 4, 6], B=[64, 128, 256], t=[5, 10, 20]),
        _split,
        "With stages of half the size the step takes as long: ranks are idle for longer.",
        bytes_sent(
            lambda c: 2 * _activation(c),
            "2A: the activation forward, a gradient backward",
            answers={"ledger": lambda seen: seen.sent},
            asks="bytes that a rank in the middle sends",
            why="1 %: the shape of an activation is told, too",
        ),
        Quantity(
            name="idle",
            asks="the share of its time for which a rank is idle (0 to 1)",
            unit="share",
            formula="1 - 1/W",
            value=lambda c: 1 - 1 / c["W"],
            answers={"ledger": idle, "clock": lambda seen: seen.found("idle")},
            **LEFT_OUT,
        ),
        clocked(
            lambda c: c["W"] * 3 * c["t"] * MILLI,
            formula="W·3t",
            asks="seconds of forward and backward",
            answers={"ledger": span_time, "clock": lambda seen: seen.seconds},
            **LEFT_OUT,
        ),
    ),
    _scene(
        "2.20",
        "K = {K} layers are divided over W = {W} stages. Layer k costs k ms: 1, 2, … {K}. At first "
        "one rank measures all layers, and tells the others.",
        draws("2.20", [2, 3, 4], K=[6, 8, 9, 12], D=[96]),
        _divided,
        "With twice the stages the largest one costs half as much at best, and never less than "
        "the most expensive layer.",
        held(
            "largest",
            _least_largest,
            "the least of all divisions",
            asks="cost of the most expensive stage",
            unit="ms",
            by="division",
        ),
        bytes_sent(
            lambda c: 8 * c["K"],
            "8K",
            **FROM_ROOT,
            why="1 %: rounding",
        ),
    ),
    _scene(
        "2.9",
        f"{PLANNED}.",
        draws("2.9", [2, 3, 4, 6], m=M),
        _planned,
        "More than twice the messages: there are p more boundaries.",
        MESSAGES,
        of_schedule(
            "steps",
            lambda c: 4 * c["m"] if c["W"] == 2 else 6 * c["m"],
            "4m for two ranks; else 6m in the middle",
            asks="steps of the rank that has most: computing, sending, receiving",
            unit="steps",
        ),
    ),
    _scene(
        "2.21",
        f"{PLANNED}. A forward takes 1, a backward 2, messages take nothing.",
        draws("2.21", [2, 3, 4, 6], m=M),
        _replayed,
        BUBBLE,
        of_schedule(
            "units",
            lambda c: 3 * (c["m"] + c["W"] - 1),
            "(m + p-1)·3",
            asks="time of the whole schedule",
            unit="units of time",
        ),
        of_schedule(
            "bubble",
            lambda c: (c["W"] - 1) / (c["m"] + c["W"] - 1),
            "(p-1)/(m + p-1)",
            asks="bubble: the idle share of the ranks' time (0 to 1)",
            unit="share",
            tolerance=0.01,
            why="1 %: three digits are enough",
        ),
        of_schedule(
            "kept",
            lambda c: c["m"],
            "m",
            asks="micro-batches whose activations a rank keeps at most",
            unit="micro-batches",
        ),
    ),
    _scene(
        "2.13",
        "p = {W} ranks run a zero-bubble schedule of m = {m} micro-batches. Forward, the "
        "gradient of the input and the gradient of the weights take 1 each, messages nothing.",
        _draw_zero,
        _without_bubble,
        BUBBLE,
        MESSAGES,
        of_schedule(
            "bubble",
            lambda c: (c["W"] - 1) / (3 * c["m"] + c["W"] - 1),
            "(p-1)/(3m + p-1)",
            asks="bubble: the idle share of the ranks' time (0 to 1)",
            unit="share",
            tolerance=0.01,
            why="1 %: three digits are enough",
        ),
        of_schedule(
            "kept",
            lambda c: c["W"],
            "p, as with 1F1B",
            asks="micro-batches whose activations the first rank keeps at most",
            unit="micro-batches",
        ),
    ),
)
