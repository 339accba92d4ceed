"""Predictions for data parallelism: averaging, buckets, local SGD."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case
from .models import (
    MICRO,
    MODEL,
    Slowly,
    bucket_of,
    drawn,
    first_start,
    gradients,
    layer_bytes,
    layers,
    model_bytes,
    waited_by_ledger,
)
from .scene import (
    Found,
    Prepare,
    Quantity,
    Scene,
    Work,
    bytes_sent,
    clocked,
    collectives,
    ring_seconds,
)

SMALL = {"tolerance": 0.02, "why": "2 %: numbers for losses and counts travel, too"}


def _share(case: Case) -> float:
    return 2 * (case["W"] - 1) / case["W"] * model_bytes(case)


def _broadcast(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    return lambda: impl.broadcast_model_state(model)


def _average(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    gradients(model)
    return lambda: impl.average_gradients([*model.parameters()], 4)


def _accumulate(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    window = [(torch.ones(2, case["D"]), torch.zeros(2, dtype=torch.int64))] * case["m"]
    return lambda: impl.accumulate_and_reduce(model, window) and None


def _state(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    tensors = [p.detach() for p in layers(case).parameters()]
    return lambda: impl.broadcast_tensors(tensors, case["k"] * layer_bytes(case))


def _buckets(case: Case) -> int:
    return -(-case["K"] // case["k"])


def _broadcast_seconds(case: Case) -> float:
    start = case.machine.launch + (case["W"] - 1) * case.alpha
    return _buckets(case) * start + model_bytes(case) * case.beta


def _overlap(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    limit = case["k"] * layer_bytes(case)
    wrapped = impl.BucketedDDP(model, bucket_bytes=limit, first_bucket_bytes=limit)
    steps, come = [*model], 0
    found: Found = {"first": 0.0}

    def forward(x: Tensor) -> Tensor:
        for layer in steps:
            x = Slowly.apply(layer(x), case["t"] * MICRO)
        return x

    def arrived(_: Tensor) -> None:
        nonlocal come
        if not found["first"] and ctx.ledger and len(ctx.ledger.events) > begun:
            found["first"] = float(come)
        come += 1

    model.forward = forward
    for p in model.parameters():
        p.register_hook(arrived)
    begun = 1 << 62
    for _ in range(2):  # the order of the gradients is learned
        wrapped(torch.ones(2, case["D"])).sum().backward()

    def work() -> Found:
        nonlocal begun, come
        loss = wrapped(torch.ones(2, case["D"])).sum()
        begun, come = len(ctx.ledger.events) if ctx.ledger else 0, 0
        begin = time.monotonic()
        loss.backward()
        found["waited"] = time.monotonic() - begin - case["K"] * case["t"] * MICRO
        return found | {"first": found["first"] or float(come)}

    return work


def _windowed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    limit = case["k"] * layer_bytes(case)
    wrapped = impl.DDP(model, bucket_bytes=limit, first_bucket_bytes=limit, agree=True)
    batch = torch.ones(2, case["D"])
    for _ in range(2):  # the order of the gradients is learned
        wrapped(batch).sum().backward()

    def work() -> None:
        with wrapped.no_sync():
            for _ in range(case["m"] - 1):
                wrapped(batch).sum().backward()
        wrapped(batch).sum().backward()

    return work


def _exposed(case: Case) -> float:
    """f_B - T, with f_k = max(t_k, f_(k-1)) + c_k."""
    done, each = 0.0, case["t"] * MICRO
    for first in range(0, case["K"], case["k"]):
        last = min(first + case["k"], case["K"])
        done = max(done, last * each) + ring_seconds(case, (last - first) * layer_bytes(case))
    return done - case["K"] * each


def _halved(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    bucket = bucket_of(layers(case))

    def work() -> None:
        handle = impl.bf16_compress(bucket)
        if handle is not None:
            handle.wait()

    return work


def _local(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    rounds = impl.LocalSGD(layers(case), every=case["H"])

    def work() -> None:
        for _ in range(case["steps"]):
            rounds.step()

    return work


def _rounds(case: Case) -> int:
    return case["steps"] // case["H"]


def _plain(
    exercise: str, tells: str, prepare: Prepare, *quantities: Quantity, **more: list[int]
) -> Scene:
    return Scene(
        exercise=exercise,
        tells=f"{MODEL}. {tells}",
        draw=lambda random_: drawn(exercise, random_, **more),
        prepare=prepare,
        quantities=quantities,
        doubled="The bytes per rank stay below 2P; the latency of a ring doubles.",
    )


OVERLAP = (
    collectives(
        _buckets,
        "⌈K/k⌉",
        answers={"ledger": lambda s: s.messages, "clock": lambda s: s.calls},
        asks="buckets that leave in one backward",
        unit="buckets",
        name="buckets",
    ),
    bytes_sent(_share, "2(W-1)/W·P"),
    Quantity(
        name="first",
        asks="gradients that have come when the first bucket leaves",
        unit="gradients",
        formula="k",
        value=lambda c: c["k"],
        answers={"ledger": lambda s: s.found("first"), "clock": first_start},
    ),
    Quantity(
        name="exposed",
        asks="seconds that a rank waits after its backward",
        unit="seconds",
        formula="f_B - K·t, f_j = max(j·k·t, f_(j-1)) + c, c = launch + 2(W-1)·(α + bucket/W·β)",
        value=_exposed,
        answers={"ledger": waited_by_ledger, "clock": lambda s: s.found("waited")},
        tolerance=0.03,
        why="3 %: a rank needs time to read its clock",
    ),
)

SCENES = (
    _plain(
        "1.3",
        "Rank 0 gives all others its weights.",
        _broadcast,
        bytes_sent(model_bytes, "P", name="root_bytes", asks="bytes that rank 0 sends to a chain"),
    ),
    _plain(
        "1.4",
        "Every rank has gradients; the ranks average them, weighted by their samples.",
        _average,
        bytes_sent(_share, "2(W-1)/W·P", **SMALL),
    ),
    _plain(
        "2.2",
        "A step has {m} micro-batches of 2 samples per rank; gradients are accumulated.",
        _accumulate,
        bytes_sent(_share, "2(W-1)/W·P, whatever the number of micro-batches", **SMALL),
        m=[2, 4, 8],
    ),
    _plain(
        "3.9",
        "Rank 0 broadcasts all weights in messages of at most {k} layers.",
        _state,
        collectives(_buckets, "⌈K/k⌉", asks="broadcasts"),
        bytes_sent(model_bytes, "P", name="root_bytes", asks="bytes that rank 0 sends to a chain"),
        clocked(_broadcast_seconds, formula="⌈K/k⌉·(launch + (W-1)·α) + P·β"),
        k=[1, 2, 3, 5],
    ),
    _plain(
        "3.10",
        "Each bucket has room for k = {k} of the layers, the first one, too. In backward a layer "
        "takes t = {t} µs, the last layer first. Forward is over.",
        _overlap,
        *OVERLAP,
        k=[1, 2, 3],
        t=[20, 50, 100, 200],
    ),
    _plain(
        "3.11",
        "Each bucket has room for k = {k} of the layers. A step has {m} micro-batches, all but the "
        "last one inside no_sync. The ranks agree on missing gradients.",
        _windowed,
        collectives(lambda c: _buckets(c) + 1, "⌈K/k⌉ + 1: the buckets, and who has what"),
        bytes_sent(_share, "2(W-1)/W·P, whatever the number of micro-batches", **SMALL),
        k=[1, 2, 3],
        m=[2, 4],
    ),
    _plain(
        "3.12",
        "All gradients are one bucket, which is summed in bfloat16.",
        _halved,
        bytes_sent(lambda c: _share(c) / 2, "2(W-1)/W·P/2"),
        clocked(
            lambda c: ring_seconds(c, model_bytes(c) / 2), formula="launch + 2(W-1)·(α + P/2W·β)"
        ),
    ),
    _plain(
        "3.25",
        "They train {steps} steps of local SGD, and average the weights after each {H}.",
        _local,
        collectives(_rounds, "⌊steps/H⌋"),
        bytes_sent(lambda c: _rounds(c) * _share(c), "⌊steps/H⌋·2(W-1)/W·P"),
        clocked(
            lambda c: _rounds(c) * ring_seconds(c, model_bytes(c)),
            formula="⌊steps/H⌋·(launch + 2(W-1)·(α + P/W·β))",
        ),
        H=[2, 4, 8],
        steps=[8, 16, 20],
    ),
)
