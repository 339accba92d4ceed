"""Predictions for ZeRO and FSDP."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: here once, not per run
from torch import nn

from ...grading.implementation import Implementation
from ...observe.memory import held_by, storage_bytes
from ...ranks.context import RankContext
from .case import Case
from .models import ADAM, MODEL, drawn, gradients, layers, model_bytes
from .nodes import across
from .scene import (
    Found,
    Prepare,
    Quantity,
    Scene,
    Seen,
    Work,
    bytes_sent,
    clocked,
    collectives,
    half_seconds,
)

HALVES = "What is sharded halves per rank; the bytes that it sends grow by half at most."


def _part(case: Case) -> float:
    """(W-1)/W·P"""
    return (case["W"] - 1) / case["W"] * model_bytes(case)


def _zero1(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    gradients(model)
    optimizer = impl.ZeroOptimizer(model.parameters(), torch.optim.Adam)

    def work() -> Found:
        optimizer.step()
        return {"state": float(held_by(nn.Module(), optimizer).optimizer)}

    return work


def _zero2(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    optimizer = impl.Zero2Optimizer(model.parameters(), torch.optim.Adam)

    def work() -> Found:
        model(torch.ones(2, case["D"])).sum().backward()
        kept = storage_bytes(vector.gradient for vector in optimizer.vectors)
        optimizer.step()
        held = held_by(model, optimizer)
        return {"state": float(kept + held.parameters + held.gradients + held.optimizer)}

    return work


def _train_sharded(model: Any, case: Case) -> Work:
    optimizer = torch.optim.Adam(model.parameters())

    def work() -> Found:
        model(torch.ones(2, case["D"])).sum().backward()
        optimizer.step()
        return {"state": float(held_by(model, optimizer).total)}

    return work


def _fsdp(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    return _train_sharded(impl.FSDP(model, [*model]), case)


def _rows(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    layered = layers(case)
    model = impl.PerParameterFSDP(layered, [*layered])
    step = _train_sharded(model, case)

    def work() -> Found | None:
        with model.no_sync():
            for _ in range(case["a"] - 1):
                model(torch.ones(2, case["D"])).sum().backward()
        return step()

    return work


def _hybrid(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    inside, across = impl.node_groups(case["L"])
    flat = partial(impl.HybridFlat, replicas=across)
    return _train_sharded(
        impl.module("fsdp").FSDP(model, [*model], group=inside, flat_type=flat), case
    )


def _draw_hybrid(random_: random.Random) -> Case:
    nodes, each = random_.choice([2, 3, 4]), random_.choice([2, 4])
    sizes = drawn("3.19", random_).sizes | {"W": nodes * each, "M": nodes, "L": each}
    return Case("3.19", random_.choice(["dgx-h100", "p4d-a100"]), sizes, nodes=nodes)


def _state(value: Any, formula: str, ledger: Any, asks: str) -> Quantity:
    return Quantity(
        name="memory",
        asks=asks,
        unit="bytes",
        formula=formula,
        value=value,
        answers={"memory": lambda seen: seen.found("state"), "ledger": ledger},
        **ADAM,
    )


def _shard(seen: Seen, op: str = "all_gather") -> float:
    """The bytes of its own shards that a rank passed to ``op``."""
    return max(sum(e.payload for e in log.events if e.op == op) for log in seen.logs)


def on_layers(
    exercise: str,
    tells: str,
    prepare: Prepare,
    *quantities: Quantity,
    doubled: str = HALVES,
    **more: Any,
) -> Scene:
    """A scene whose model is K equal layers; ``more``: what else its sizes are drawn from."""
    return Scene(
        exercise=exercise,
        tells=f"{MODEL}. {tells}",
        draw=more.pop("draw", lambda random_: drawn(exercise, random_, **more)),
        prepare=prepare,
        quantities=quantities,
        doubled=doubled,
    )


SCENES = (
    on_layers(
        "3.13",
        "The gradients are averaged already. ZeRO-1 with Adam takes a step. All parameters "
        "are in one bucket.",
        _zero1,
        bytes_sent(_part, "(W-1)/W·P"),
        _state(
            lambda c: 2 * model_bytes(c) / c["W"],
            "2P/W",
            lambda seen: 2 * _shard(seen),
            "bytes of optimizer state that a rank holds after the step",
        ),
        clocked(lambda c: half_seconds(c, model_bytes(c)), formula="launch + (W-1)·(α + P/W·β)"),
    ),
    on_layers(
        "3.14",
        "ZeRO-2 with Adam runs forward, backward and a step. All parameters are in one bucket.",
        _zero2,
        bytes_sent(lambda c: 2 * _part(c), "2(W-1)/W·P"),
        _state(
            lambda c: model_bytes(c) * (1 + 3 / c["W"]),
            "P + P/W + 2P/W",
            lambda seen: (3 + seen.case["W"]) * _shard(seen),
            "bytes of weights, kept gradients and optimizer state on a rank",
        ),
    ),
    on_layers(
        "3.15",
        "FSDP makes a unit of each layer, and Adam takes the first step.",
        _fsdp,
        bytes_sent(lambda c: 3 * _part(c), "3(W-1)/W·P: gathered twice, reduce-scattered once"),
        collectives(lambda c: 3 * c["K"], "3K", name="messages"),
        _state(
            lambda c: 4 * model_bytes(c) / c["W"],
            "4P/W",
            lambda seen: 4 * _shard(seen, "reduce_scatter") / seen.case["W"],
            "bytes of weights, gradients and optimizer state on a rank after the step",
        ),
    ),
    on_layers(
        "3.32",
        "Per-parameter sharding makes a unit of each layer. After a = {a} backward passes, all but "
        "the last one in no_sync, Adam takes the first step.",
        _rows,
        bytes_sent(
            lambda c: (2 * c["a"] + 1) * _part(c),
            "(2a + 1)·(W-1)/W·P: gathered twice in each pass, reduce-scattered once",
        ),
        collectives(lambda c: (2 * c["a"] + 1) * c["K"], "(2a + 1)·K", name="messages"),
        _state(
            lambda c: 4 * model_bytes(c) / c["W"],
            "4P/W",
            lambda seen: 4 * _shard(seen, "reduce_scatter") / seen.case["W"],
            "bytes of weights, gradients and optimizer state on a rank after the step",
        ),
        a=[2, 3, 4],
    ),
    on_layers(
        "3.19",
        "They are on M = {M} nodes of L = {L}. FSDP shards inside a node, replicates across, and "
        "makes a unit of each layer. Adam takes the first step.",
        _hybrid,
        across(model_bytes, "2(M-1)/M·P/L", "1 %: padding"),
        _state(
            lambda c: 4 * model_bytes(c) / c["L"],
            "4P/L",
            lambda seen: 4 * _shard(seen, "reduce_scatter") / seen.case["L"],
            "bytes of weights, gradients and optimizer state on a rank after the step",
        ),
        draw=_draw_hybrid,
        doubled="With twice as many nodes the memory stays; the bytes across stay below 2P/L.",
    ),
)
