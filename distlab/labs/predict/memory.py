"""Predictions for memory: activations, mixed precision, FSDP's variants, FLOPs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...grading.implementation import Implementation
from ...observe.memory import PeakMemory, held_by, storage_bytes
from ...ranks.context import RankContext
from .case import Case, draws
from .models import ADAM, MODEL, drawn, gradients, layer_bytes, layers, model_bytes
from .scene import Found, Scene, Work, bytes_sent, collectives, held
from .sharding import HALVES

ROWS = 8  # of an activation that is computed again


def _windowed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    gradients(model)
    one = torch.ones(case["b"], case["D"]), torch.zeros(case["b"], dtype=torch.int64)
    peak = 0

    def work() -> Found:
        with PeakMemory() as memory:

            def note(*_: object) -> None:
                nonlocal peak
                peak = max(peak, memory.current)

            model.register_forward_hook(note)
            impl.accumulate(model, [one] * case["m"], float(case["b"] * case["m"]))
        return {"kept": float(peak)}

    return work


def _sixteen(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    inner = layers(case)
    model = impl.MixedPrecision(inner, torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    window = [(torch.ones(2, case["D"]), torch.zeros(2, dtype=torch.int64))]

    def work() -> Found:
        impl.mixed_step(model, optimizer, window)
        weights = [p for p in inner.parameters() if p.dtype == torch.bfloat16]
        return {"memory": float(storage_bytes(weights) + held_by(model, optimizer).total)}

    return work


class _Chain(nn.Module):
    """``depth`` functions that keep their result for backward."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        """tanh of tanh of …"""
        for _ in range(self.depth):
            x = x.tanh()
        return x


def _recomputed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    chain = [_Chain(case["q"]) for _ in range(case["n"])]
    x = torch.ones(ROWS, case["D"], requires_grad=True)

    def work() -> Found:
        with PeakMemory() as memory:
            loss = impl.checkpoint_sequential(chain, case["s"], x * 1.0).sum()
            kept = memory.current
        loss.backward()
        return {"kept": float(kept)}

    return work


def _chosen(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    width = case["D"]
    parts: list[nn.Module] = []
    for _ in range(case["n"]):
        up = nn.Linear(width, case["q"] * width, bias=False)
        parts += [up, nn.Tanh(), nn.Linear(case["q"] * width, width, bias=False)]
    x = torch.ones(ROWS, width, requires_grad=True)

    def work() -> Found:
        keep = impl.at_least(case["f"] * width / 2)
        with PeakMemory() as memory:
            loss = impl.selective_checkpoint(keep, nn.Sequential(*parts), x * 1.0).sum()
            kept = memory.current
        loss.backward()
        return {"kept": float(kept)}

    return work


def _input_bytes(case: Case) -> int:
    return ROWS * case["D"] * 4


def _sharded(
    ctx: RankContext, impl: Implementation, case: Case, kind: str, dtype: torch.dtype
) -> Work:
    """FSDP or a variant of it trains one step; ``kind``: what differs."""
    model = layers(case)
    whole, options = impl.module("fsdp").FSDP, {}
    if kind == "prefetch":
        whole = impl.PrefetchFSDP
    if kind == "precision":
        reduced = torch.float32 if case["r"] == 4 else torch.bfloat16
        options = {"flat_type": partial(impl.MixedPrecisionFlat, reduce_dtype=reduced)}
    if kind == "offload":
        options = {"flat_type": impl.OffloadFlat}
    sharded = whole(model, [*model], **options)
    optimizer = torch.optim.Adam(sharded.parameters())

    def work() -> Found:
        sharded(torch.ones(2, case["D"], dtype=dtype)).sum().backward()
        optimizer.step()
        return {"memory": float(held_by(sharded, optimizer).total)}

    return work


def _counted(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model, inputs = layers(case), torch.ones(case["b"], case["D"])
    return lambda: {"flops": float(impl.count_flops(model, inputs))}


def _part(case: Case) -> float:
    return (case["W"] - 1) / case["W"]


STATE = held(
    "memory",
    lambda c: 4 * model_bytes(c) / c["W"],
    "4P/W",
    asks="bytes of weights, gradients and optimizer state on a rank after the step",
    **ADAM,
)
STEP = "FSDP makes a unit of each layer, and Adam takes the first step."
ON_ONE = "Each rank does the same, whatever W is."


def _fsdp(exercise: str, tells: str, kind: str, *quantities: Any, **more: Any) -> Scene:
    dtype = torch.bfloat16 if kind == "precision" else torch.float32
    return Scene(
        exercise=exercise,
        tells=f"{MODEL}. {STEP} {tells}",
        draw=lambda random_: drawn(exercise, random_, **more),
        prepare=partial(_sharded, kind=kind, dtype=dtype),
        quantities=(*quantities, STATE),
        doubled=HALVES,
    )


SCENES = (
    Scene(
        exercise="2.1",
        tells="A step of one rank has m = {m} micro-batches of b = {b} samples. Each of {K} linear "
        "layers maps {D} float32 numbers to {D}, without bias. The first input and the gradients "
        "are there already.",
        draw=draws("2.1", [1], m=[2, 4, 8], b=[8, 16, 32], K=[4, 6, 8], D=[96, 144]),
        prepare=_windowed,
        quantities=(
            held(
                "kept",
                lambda c: c["K"] * c["b"] * c["D"] * 4,
                "K·b·4D, for any m",
                asks="bytes of the layers' outputs that are kept when a forward ends, at most",
                tolerance=0.01,
                why="1 %: losses are numbers, too",
            ),
        ),
        doubled=ON_ONE,
    ),
    Scene(
        exercise="2.5",
        tells=f"{MODEL}. They compute in bfloat16 with float32 masters, and Adam takes a step.",
        draw=partial(drawn, "2.5"),
        prepare=_sixteen,
        quantities=(
            held(
                "memory",
                lambda c: 4.5 * model_bytes(c),
                "18 bytes for each of P/4 weights: 2 + 4 + 4 + 8",
                asks="bytes of weights, masters, gradients and optimizer state on a rank",
                **ADAM,
            ),
            bytes_sent(
                lambda c: 2 * _part(c) * model_bytes(c),
                "2(W-1)/W·P",
                tolerance=0.02,
                why="2 %: numbers for losses and counts travel, too",
            ),
        ),
        doubled="The memory of a rank stays: nothing is sharded. The bytes stay below 2P.",
    ),
    Scene(
        exercise="2.7",
        tells="One rank runs n = {n} layers in s = {s} segments, all but the last one "
        f"checkpointed. A layer's input has {ROWS} x {{D}} float32 numbers. Each layer keeps "
        "q = {q} such tensors for backward.",
        draw=draws("2.7", [1], n=[12, 24], s=[2, 3, 4, 6], q=[1, 2, 4], D=[256, 512]),
        prepare=_recomputed,
        quantities=(
            held(
                "kept",
                lambda c: (c["s"] - 1 + c["n"] // c["s"] * c["q"]) * _input_bytes(c),
                "(s-1)·A + n/s·L, A = bytes of an input, L = q·A",
                asks="bytes that are kept for backward when the forward ends",
                tolerance=0.01,
                why="1 %: the loss is a number, too",
            ),
        ),
        doubled=ON_ONE,
    ),
    Scene(
        exercise="2.27",
        tells="One rank runs n = {n} layers as one segment, in float32. A layer is a product of "
        f"{ROWS} x {{D}} numbers with D x qD, q = {{q}}, then tanh, then a product with qD x D, "
        "without bias. The policy keeps what saves at least {f}·D/2 FLOPs per byte.",
        draw=draws("2.27", [1], n=[4, 6, 8], q=[2, 3, 4], f=[1, 2], D=[256, 512]),
        prepare=_chosen,
        quantities=(
            held(
                "kept",
                lambda c: (c["n"] + (c["f"] == 1) * c["n"] * c["q"]) * _input_bytes(c),
                "(1 + n-1)·A, and n·q·A if f = 1: the input, outputs of all second products but "
                "the last, and outputs of the first ones",
                asks="bytes that are kept for backward when the forward ends",
                tolerance=0.01,
                why="1 %: the loss is a number, too",
            ),
        ),
        doubled=ON_ONE,
    ),
    _fsdp(
        "3.16",
        "The next unit's messages travel ahead, and the last unit of forward stays gathered.",
        "prefetch",
        bytes_sent(
            lambda c: _part(c) * (3 * model_bytes(c) - layer_bytes(c)), "(W-1)/W·(3P - P_last)"
        ),
        collectives(lambda c: 3 * c["K"] - 1, "3K - 1", name="messages"),
    ),
    _fsdp(
        "3.17",
        "It computes in bfloat16 with float32 shards. Gradients travel with {r} bytes each.",
        "precision",
        bytes_sent(lambda c: _part(c) * model_bytes(c) / 4 * (4 + c["r"]), "(W-1)/W·P/4·(2+2+r)"),
        r=[2, 4],
    ),
    _fsdp(
        "3.18",
        "Shards and optimizer state are in the CPU's memory.",
        "offload",
        bytes_sent(lambda c: 3 * _part(c) * model_bytes(c), "3(W-1)/W·P: as without offloading"),
    ),
    Scene(
        exercise="4.17",
        tells="b = {b} samples run forward and backward through {K} linear layers of {D} x {D}, "
        "without bias. The input needs no gradient.",
        draw=draws("4.17", [1], b=[8, 32, 256], K=[4, 6, 8], D=[96, 192, 512]),
        prepare=_counted,
        quantities=(
            held(
                "flops",
                lambda c: 2 * c["b"] * c["D"] ** 2 * (3 * c["K"] - 1),
                "2·b·D²·(3K - 1): the first layer's input gets no gradient",
                asks="FLOPs of forward and backward",
                unit="FLOPs",
                by="counter",
                tolerance=0.01,
                why="1 %: rounding",
            ),
        ),
        doubled=ON_ONE,
    ),
)
