"""The prediction for Streaming DiLoCo: whose turn it is, and bytes of 4 bits."""

from __future__ import annotations

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case
from .models import layers
from .scene import Work, bytes_sent, clocked, collectives, half_seconds
from .sharding import on_layers


def _streams(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    parts = impl.strided([*model], case["F"])
    rounds = impl.StreamingDiLoCo(model, parts, every=case["H"], delay=0)

    def work() -> None:
        for _ in range(case["steps"]):
            rounds.step()

    return work


def _sent(case: Case) -> list[int]:
    """The bytes that a rank packs for each message: fragment k leaves first after ⌊(k+1)·H/F⌋."""
    found = []
    for k in range(case["F"]):
        numbers = len(range(k, case["K"], case["F"])) * case["D"] ** 2
        turns = len(range((k + 1) * case["H"] // case["F"], case["steps"] + 1, case["H"]))
        found += turns * [17 * -(-numbers // 32)]
    return found


SCENES = (
    on_layers(
        "3.34",
        "They train {steps} steps of Streaming DiLoCo: F = {F} fragments, H = {H}, τ = 0, 4 bits. "
        "Layer i is in fragment i mod F. finish() is not called.",
        _streams,
        collectives(
            lambda c: len(_sent(c)), "for each k: how many of ⌊(k+1)·H/F⌋ + i·H are ≤ steps"
        ),
        bytes_sent(
            lambda c: (c["W"] - 1) * sum(_sent(c)), "(W-1)·17·⌈n/32⌉ for each message of n numbers"
        ),
        clocked(
            lambda c: sum(half_seconds(c, c["W"] * nbytes) for nbytes in _sent(c)),
            formula="launch + (W-1)·(α + 17·⌈n/32⌉·β) for each message",
        ),
        doubled="The bytes per rank more than double: with 4 bits every rank gathers the numbers "
        "of all. From 16 ranks on an all-reduce in float32 sends less.",
        F=[1, 2, 4],
        H=[4, 8],
        steps=[9, 16, 21],
    ),
)
