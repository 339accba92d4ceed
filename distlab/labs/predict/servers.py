"""Predictions for parameter servers."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch

from ...grading.implementation import Implementation
from ...observe.log import Log
from ...ranks.context import RankContext
from .case import Case
from .models import MODEL, drawn, layers, model_bytes
from .scene import Prepare, Quantity, Scene, Seen, Work

HEADERS: dict[str, Any] = {
    "tolerance": 0.03,
    "why": "3 %: headers, and what ranks compare before they begin",
}


def _served(
    ctx: RankContext, impl: Implementation, case: Case, staleness: float | None = None
) -> Work:
    model = layers(case)
    batch = torch.ones(2, case["D"]), torch.zeros(2, dtype=torch.int64)
    batches, servers = [batch] * case["steps"], case["S"]
    fit = impl.module("parameter_server").fit
    return lambda: fit(model, batches, servers=servers, lr=0.1, staleness=staleness) and None


def _bounded(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    return _served(ctx, impl, case, case["s"])


def _drawn(exercise: str, random_: random.Random) -> Case:
    case = drawn(exercise, random_, S=[1, 2], steps=[2, 3, 5], s=[0, 1, 2])
    sizes = case.sizes | {"W": case["W"] + 2}
    return Case(exercise, case.cluster, sizes, case.spread or sizes["W"] > 8)


def _server_bytes(case: Case) -> float:
    return 2 * (case["W"] - case["S"]) * case["steps"] * model_bytes(case) / case["S"]


def _beside_the_first_wait(seen: Seen) -> float:
    """At first a server waits until those before it have served the first worker."""
    servers = seen.case["S"]
    return seen.volume - (servers - 1) * model_bytes(seen.case) / servers


def _of_server(**more: object) -> Quantity:
    return Quantity(
        name="server_bytes",
        asks="bytes through the link of one server, both ways together",
        unit="bytes",
        formula="steps·(W-S)·2P/S",
        value=_server_bytes,
        answers={
            "ledger": lambda s: max(log.sent + log.received for log in s.logs[: s.case["S"]]),
            **more,  # type: ignore[dict-item]
        },
        **HEADERS,
    )


def _sends(log: Log) -> int:
    return len(log.select("send").events)


WORKER = Quantity(
    name="worker_bytes",
    asks="bytes that one worker sends and receives together",
    unit="bytes",
    formula="steps·2P, for any number of servers",
    value=lambda c: c["steps"] * 2 * model_bytes(c),
    answers={"ledger": lambda s: max(log.sent + log.received for log in s.logs[s.case["S"] :])},
    **HEADERS,
)
REQUESTS = Quantity(
    name="messages",
    asks="messages that one worker sends, with its requests to leave",
    unit="messages",
    formula="S·(3·steps + 1): a header to pull; a header and gradients to push; one to leave",
    value=lambda c: c["S"] * (3 * c["steps"] + 1),
    answers={"ledger": lambda s: max(_sends(log) for log in s.logs[s.case["S"] :])},
)


def _scene(exercise: str, how: str, prepare: Prepare, *quantities: Quantity) -> Scene:
    return Scene(
        exercise=exercise,
        tells=f"{MODEL}. S = {{S}} of the ranks are servers with P/S bytes each, the others train "
        f"{{steps}} steps, {how}.",
        draw=partial(_drawn, exercise),
        prepare=prepare,
        quantities=quantities,
        doubled="The server's link carries twice as much: it is the bottleneck.",
    )


SCENES = (
    _scene("3.26", "synchronous ones", _served, WORKER, REQUESTS),
    _scene("3.22", "synchronous ones", _served, _of_server(clock=_beside_the_first_wait)),
    _scene("3.23", "asynchronous ones", partial(_served, staleness=math.inf), _of_server(), WORKER),
    _scene(
        "3.24",
        "asynchronous ones, and no worker is more than {s} pushes ahead of the slowest",
        _bounded,
        _of_server(),
        WORKER,
    ),
)
