"""Predictions for all-reduces made from messages, and for the one that knows nodes."""

from __future__ import annotations

import random
from typing import Any

import torch

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, machine_of
from .models import FLOAT
from .paths import busiest, in_a_row, row_of_bytes, total
from .scene import (
    Prepare,
    Quantity,
    Scene,
    Work,
    bottleneck,
    bytes_sent,
    clocked,
    messages,
)


def _rounds(w: int) -> int:
    return (w - 1).bit_length()


def nbytes_of(case: Case) -> int:
    """Bytes of a rank's tensor."""
    return case["n"] * FLOAT


def _draw(exercise: str, least: int, most: int, worlds: tuple[int, ...]) -> Any:
    """Draws of W ranks and n numbers, a multiple of 840: nearly every W divides it."""

    def draw(random_: random.Random) -> Case:
        cluster, spread = machine_of(random_)
        w = random_.choice([each for each in worlds if spread or each <= 8])
        n = 840 * random_.randint(least, most)
        return Case(exercise, cluster, {"W": w, "n": n}, spread)

    return draw


def _calls(name: str, **more: Any) -> Prepare:
    """Ranks call the implementation's function ``name`` on a tensor of n numbers."""

    def prepare(ctx: RankContext, impl: Implementation, case: Case) -> Work:
        tensor = torch.ones(case["n"])
        return lambda: getattr(impl, name)(tensor, **more)

    return prepare


def _draw_wide(exercise: str) -> Any:
    """Tensors so different in size that latency or bytes may take most of the time."""

    def draw(random_: random.Random) -> Case:
        cluster, spread = machine_of(random_)
        sizes = {"W": random_.choice([3, 5, 6, 8]), "n": 840 * random_.choice([100, 1000, 5000])}
        return Case(exercise, cluster, sizes, spread)

    return draw


TENSOR = "W = {W} ranks, each with a tensor of {n:,} float32 numbers (N = {N:,} bytes)"
HALF = "(W-1)/W·N"
ODD = (3, 5, 6, 7, 8, 12, 16)


def _half_seconds(case: Case) -> float:
    return (case["W"] - 1) * (case.alpha + nbytes_of(case) / case["W"] * case.beta)


def _half(exercise: str, what: str, function: str, doubled: str) -> Scene:
    return Scene(
        exercise=exercise,
        tells=f"{TENSOR}, {what}.",
        draw=_draw_wide(exercise),
        prepare=_calls(function),
        quantities=(
            messages(lambda c: c["W"] - 1, "W-1"),
            bytes_sent(lambda c: (c["W"] - 1) / c["W"] * nbytes_of(c), HALF),
            clocked(_half_seconds, formula="(W-1)·(α + N/W·β)"),
            bottleneck(_half_seconds),
        ),
        doubled=doubled,
    )


def _whole(
    exercise: str,
    what: str,
    function: str,
    quantities: tuple[Quantity, ...],
    doubled: str,
    wide: bool = False,
) -> Scene:
    return Scene(
        exercise=exercise,
        tells=f"{TENSOR}, {what}.",
        draw=_draw_wide(exercise) if wide else _draw(exercise, 20, 300, ODD),
        prepare=_calls(function),
        quantities=quantities,
        doubled=doubled,
    )


def _core(case: Case) -> tuple[int, int]:
    """(log₂ P, W - P) of the largest power of two P in W."""
    power = case["W"].bit_length() - 1
    return power, case["W"] - (1 << power)


def _halving_seconds(case: Case) -> float:
    power, over = _core(case)
    whole = case.alpha + nbytes_of(case) * case.beta
    half = 2 * power * case.alpha + 2 * (1 - 0.5**power) * nbytes_of(case) * case.beta
    return half + (2 * whole if over else 0)


def _halving_bytes(case: Case) -> float:
    power, over = _core(case)
    return (2 * (1 - 0.5**power) + (1 if over else 0)) * nbytes_of(case)


def _tree_seconds(case: Case) -> float:
    return 2 * _rounds(case["W"]) * (case.alpha + nbytes_of(case) * case.beta)


RING = (
    messages(lambda c: 2 * (c["W"] - 1), "2(W-1)"),
    bytes_sent(lambda c: 2 * (c["W"] - 1) / c["W"] * nbytes_of(c), "2(W-1)/W·N"),
    clocked(lambda c: 2 * _half_seconds(c), formula="2(W-1)·(α + N/W·β)"),
    bottleneck(lambda c: 2 * _half_seconds(c)),
)
TREE = (
    total(lambda c: 2 * (c["W"] - 1), "2(W-1)"),
    in_a_row(lambda c: 2 * _rounds(c["W"]), "2⌈log₂ W⌉"),
    row_of_bytes(lambda c: 2 * _rounds(c["W"]) * nbytes_of(c), "2⌈log₂ W⌉·N"),
    clocked(_tree_seconds, formula="2⌈log₂ W⌉·(α + N·β)"),
    bottleneck(_tree_seconds),
)
HALVING = (
    Quantity(
        name="all_bytes",
        asks="bytes that all ranks together send",
        unit="bytes",
        formula="2(W-1)·N",
        value=lambda c: 2 * (c["W"] - 1) * nbytes_of(c),
        answers={"ledger": lambda seen: seen.all_sent, "clock": lambda seen: seen.shared},
        tolerance=0.01,
        why="1 %: pieces are whole elements",
    ),
    busiest(
        _halving_bytes,
        "2(P-1)/P·N (+ N if W ≠ P)",
        lambda seen: seen.volume - (nbytes_of(seen.case) if _core(seen.case)[1] else 0),
    ),
    clocked(_halving_seconds, formula="2 log₂ P·α + 2(P-1)/P·N·β (+ 2(α + N·β) if W ≠ P)"),
)


def _simple(exercise: str, strategy: str, quantities: tuple[Quantity, ...]) -> Scene:
    return _whole(
        exercise,
        f"all-reduced by the strategy “{strategy}”",
        f"all_reduce_{strategy}",
        quantities,
        "root: twice the bytes through the root's link, which is the bottleneck.",
    )


ROOT = (
    total(lambda c: 2 * (c["W"] - 1), "2(W-1)"),
    busiest(lambda c: (c["W"] - 1) * nbytes_of(c), "(W-1)·N", lambda seen: seen.volume / 2),
)
CHAIN = (
    total(lambda c: 2 * (c["W"] - 1), "2(W-1)"),
    busiest(lambda c: 2 * nbytes_of(c), "2N", lambda seen: seen.volume / (seen.case["W"] - 1)),
    clocked(
        lambda c: 2 * (c["W"] - 1) * (c.alpha + nbytes_of(c) * c.beta), formula="2(W-1)·(α + N·β)"
    ),
)


def _segmented(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    tensor = torch.ones(case["n"])
    size = nbytes_of(case) // case["W"] // case["S"]
    return lambda: impl.segmented_ring_all_reduce(tensor, segment_bytes=size)


def _draw_segments(random_: random.Random) -> Case:
    cluster, spread = machine_of(random_)
    w, segments = random_.choice([3, 4, 6, 8]), random_.choice([2, 4, 8])
    n = w * segments * 1000 * random_.randint(2, 6)
    return Case("3.4", cluster, {"W": w, "n": n, "S": segments}, spread)


SCENES = (
    _simple("1.7", "root", ROOT),
    _simple("1.8", "chain", CHAIN),
    _half(
        "3.1",
        "reduce-scattered around a ring",
        "ring_reduce_scatter",
        "Bytes stay; messages and their latency double.",
    ),
    _half(
        "3.2",
        "all-gathered around a ring (a rank's own chunk is 1/W of the tensor)",
        "ring_all_gather",
        "Bytes stay; messages and their latency double.",
    ),
    _whole(
        "3.3",
        "all-reduced around a ring",
        "ring_all_reduce",
        RING,
        "Bytes stay near 2N; the latency 2(W-1)·α doubles, and small tensors feel it.",
        wide=True,
    ),
    Scene(
        exercise="3.4",
        tells=f"{TENSOR}, all-reduced around a ring, each chunk in {{S}} segments.",
        draw=_draw_segments,
        prepare=_segmented,
        quantities=(
            bytes_sent(lambda c: 2 * (c["W"] - 1) / c["W"] * nbytes_of(c), "2(W-1)/W·N"),
            messages(
                lambda c: 2 * (c["W"] - 1) * c["S"],
                "2(W-1)·S",
                answers={
                    "ledger": lambda seen: seen.messages,
                    "clock": lambda seen: float(
                        round(seen.shared * seen.case["S"] / nbytes_of(seen.case))
                    ),
                },
            ),
        ),
        doubled="Bytes stay near 2N; chunks are half as long, so half as many segments would do.",
    ),
    _whole(
        "3.5",
        "all-reduced along a binomial tree",
        "tree_all_reduce",
        TREE,
        "One more round each way: 2(α + N·β) more.",
    ),
    _whole(
        "3.6",
        "all-reduced by halving and doubling (P: the largest power of two in W)",
        "halving_doubling_all_reduce",
        HALVING,
        "Two more messages in a row; bytes stay near 2N.",
    ),
)
