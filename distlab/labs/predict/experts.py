"""Predictions for a mixture of experts whose tokens all want the same few experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import FLOAT
from .scene import (
    Found,
    Quantity,
    Scene,
    Seen,
    Work,
    bytes_sent,
    clocked,
    collectives,
    held,
    ring_seconds,
)

COUNT = 8  # bytes of a count
TELLS = (
    "W = {W} ranks have {t} tokens each. All tokens choose the same K = {K} of E = {E} experts, "
    "the first ones. The capacity factor is c = {c}. "
)


def _drawn(exercise: str, **more: Any) -> Any:
    """Sizes with which an expert has room for less than a rank's tokens."""
    sizes = {"t": [64, 128, 256], "K": [1, 2], "E": [16, 32], "c": [1, 2, 4]}
    return draws(exercise, (2, 4, 8), **sizes, **more)


def _room(case: Case) -> int:
    """C, a whole number for all sizes that are drawn."""
    return case["c"] * case["K"] * case["t"] // case["E"]


def _router(impl: Implementation, case: Case, width: int) -> Any:
    """A router that finds all experts equally probable; its bias alone chooses."""
    router = impl.Router(width, case["E"], top_k=case["K"], capacity_factor=float(case["c"]))
    nn.init.zeros_(router.weight)
    router.bias_E[: case["K"]] = 1.0
    return router


def _routed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    router, x = _router(impl, case, 8), torch.ones(case["t"], 8)

    def work() -> Found:
        routing = router(x)
        return {
            "load": float(routing.load_E.max()),
            "dropped": float((~routing.kept_NK).sum()),
        }

    return work


def _spread(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    width, experts = case["D"], case["E"]
    up = torch.ones(experts, width, 4, requires_grad=True)
    down = torch.ones(experts, 4, width, requires_grad=True)
    layer = impl.ExpertParallel(_router(impl, case, width), up, down)
    x = torch.ones(case["t"], width, requires_grad=True)

    def work() -> Found:
        layer(x)[0].sum().backward()
        return {"rows": float(sum(layer.rows))}

    return work


def _brought(case: Case, comes: int) -> int:
    """Load and sizes, then M rows out and R back, forward and backward."""
    row = case["D"] * FLOAT
    return 2 * COUNT * case["E"] + 2 * (case["K"] * _room(case) + comes) * row


def _payloads(seen: Seen) -> list[int]:
    """Bytes that each rank gives its collectives."""
    return [sum(event.payload for event in log.events) for log in seen.logs]


SCENES = (
    Scene(
        exercise="2.24",
        tells=TELLS + "The router routes them once.",
        draw=_drawn("2.24"),
        prepare=_routed,
        quantities=(
            held(
                "load",
                lambda c: c["W"] * c["t"],
                "W·tokens: of the group, dropped choices too",
                asks="load of the busiest expert",
                unit="choices",
                by="state",
            ),
            held(
                "dropped",
                lambda c: c["K"] * (c["t"] - _room(c)),
                "K·(tokens - C), C = ⌈c·K·tokens/E⌉",
                asks="choices that a rank drops",
                unit="choices",
                by="state",
            ),
            bytes_sent(
                lambda c: 2 * (c["W"] - 1) / c["W"] * COUNT * c["E"],
                "2(W-1)/W·8·E: one all-reduce of the load",
            ),
            clocked(
                lambda c: ring_seconds(c, COUNT * c["E"]),
                formula="launch + 2(W-1)·(α + 8·E/W·β)",
            ),
        ),
        doubled="The load doubles. What a rank drops stays, as the capacity is each rank's own.",
    ),
    Scene(
        exercise="2.25",
        tells=TELLS + "Experts 0 … E/W-1 live on rank 0, and so on. A row has D = {D} float32 "
        "numbers. The layer runs forward and backward once, and the tokens need gradients.",
        draw=_drawn("2.25", D=[64, 128]),
        prepare=_spread,
        quantities=(
            collectives(lambda c: 6, "1 of the router + 3 forward + 2 backward"),
            held(
                "rows",
                lambda c: c["W"] * c["K"] * _room(c),
                "W·K·C, C = ⌈c·K·tokens/E⌉: all kept choices of all ranks",
                asks="rows that the busiest rank computes",
                unit="rows",
                by="state",
            ),
            Quantity(
                name="busiest",
                asks="bytes that rank 0 brings to all collectives, its own rows included",
                unit="bytes",
                formula="16·E + 2·(M + R)·4·D, M = K·C, R = W·M",
                value=lambda c: _brought(c, c["W"] * c["K"] * _room(c)),
                answers={"ledger": lambda seen: _payloads(seen)[0]},
            ),
            Quantity(
                name="idle",
                asks="bytes that the last rank brings, whose experts nobody chose",
                unit="bytes",
                formula="16·E + 2·M·4·D, M = K·C: R is zero",
                value=lambda c: _brought(c, 0),
                answers={"ledger": lambda seen: _payloads(seen)[-1]},
            ),
        ),
        doubled="Rank 0 computes and returns twice as many rows; the last rank brings the same.",
    ),
)
