"""Predictions for gradients that travel compressed."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case
from .models import bucket_of, layers, model_bytes
from .scene import Quantity, Scene, Work, bytes_sent, clocked, collectives, ring_seconds
from .sharding import on_layers

REDUCED = (
    "The bytes per rank stay below twice what a rank passes in; the latency more than doubles."
)


def _compressed(ctx: RankContext, impl: Implementation, case: Case, name: str) -> Work:
    model = layers(case)
    made = {
        "TopK": lambda: impl.TopK(model.parameters(), 1 / case["share"]),
        "RandomK": lambda: impl.RandomK(model.parameters(), 1 / case["share"]),
        "PowerSGD": lambda: impl.PowerSGD(model.parameters(), case["r"]),
        "Int8": lambda: impl.Int8(),
    }
    hook, bucket = made[name](), bucket_of(model)

    def work() -> None:
        handle = hook(bucket)
        if handle is not None:
            handle.wait()

    return work


def _chosen(case: Case) -> int:
    return round(model_bytes(case) / 4 / case["share"])


def _factors(case: Case) -> float:
    """Bytes of the thin matrices of all layers."""
    return case["K"] * 2 * case["r"] * case["D"] * 4


def _int8(case: Case) -> float:
    numbers = model_bytes(case) // 4
    return 2 * (case["W"] - 1) * (-(-numbers // case["W"]) + 4)


def _hooked(exercise: str, tells: str, name: str, *quantities: Quantity, **more: Any) -> Scene:
    return on_layers(
        exercise,
        f"All gradients are one bucket. {tells}",
        partial(_compressed, name=name),
        *quantities,
        **more,
    )


SCENES = (
    _hooked(
        "4.6",
        "Top-K sends 1/{share} of the entries.",
        "TopK",
        collectives(lambda c: 2, "2: values and positions", name="messages"),
        bytes_sent(lambda c: (c["W"] - 1) * _chosen(c) * 8, "(W-1)·k·(4 + 4)"),
        clocked(
            lambda c: (
                2 * c.machine.launch
                + 2 * (c["W"] - 1) * c.alpha
                + (c["W"] - 1) * _chosen(c) * 8 * c.beta
            ),
            formula="2·launch + (W-1)·(2α + 8k·β)",
        ),
        share=[20, 50, 100],
        doubled="The bytes more than double: each rank's choice goes to all.",
    ),
    _hooked(
        "4.7",
        "Random-K sends 1/{share} of the entries.",
        "RandomK",
        collectives(lambda c: 1, "1: positions follow from the seed", name="messages"),
        bytes_sent(lambda c: 2 * (c["W"] - 1) / c["W"] * _chosen(c) * 4, "2(W-1)/W·k·4"),
        clocked(lambda c: ring_seconds(c, _chosen(c) * 4), formula="launch + 2(W-1)·(α + 4k/W·β)"),
        share=[20, 50, 100],
        doubled=REDUCED,
    ),
    _hooked(
        "4.8",
        "PowerSGD sends two thin matrices of r = {r} columns per layer.",
        "PowerSGD",
        collectives(lambda c: 2, "2: one per thin matrix, for all layers at once", name="messages"),
        bytes_sent(lambda c: 2 * (c["W"] - 1) / c["W"] * _factors(c), "2(W-1)/W·K·4r(D + D)"),
        clocked(
            lambda c: 2 * ring_seconds(c, _factors(c) / 2),
            formula="2·launch + 4(W-1)·α + 2(W-1)/W·8KrD·β",
        ),
        r=[1, 2, 4],
        doubled=REDUCED,
    ),
    _hooked(
        "4.9",
        "Every number is sent as int8.",
        "Int8",
        collectives(lambda c: 2, "2: all-to-all, all-gather", name="messages"),
        bytes_sent(_int8, "2(W-1)·(⌈n/W⌉ + 4), n = P/4"),
        doubled="The bytes per rank stay near 2n.",
    ),
)
