"""Predictions for batch norms over all ranks."""

from __future__ import annotations

import torch
from torch import nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import FLOAT
from .scene import Found, Scene, Work, bytes_sent, clocked, collectives, ring_seconds

SUM = 8  # bytes of a sum in forward


def _norms(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    layers = [nn.BatchNorm1d(case["C"]) for _ in range(case["K"])]
    for layer in layers[: case["f"]]:
        layer.eval()
    model = impl.convert_batch_norms(nn.Sequential(*layers))
    x = torch.ones(case["n"], case["C"], requires_grad=True)

    def work() -> Found:
        model(x).sum().backward()
        return {}

    return work


def _forward(case: Case) -> int:
    return SUM * (2 * case["C"] + 1)


def _backward(case: Case) -> int:
    return FLOAT * 2 * case["C"]


def _seconds(case: Case) -> float:
    each = ring_seconds(case, _forward(case)) + ring_seconds(case, _backward(case))
    return (case["K"] - case["f"]) * each


SCENES = (
    Scene(
        exercise="2.28",
        tells="A model on W = {W} ranks has K = {K} batch norms over all ranks, one after the "
        "other, with C = {C} channels each. The first f = {f} of them are in eval mode. Each rank "
        "has {n} rows of float32, which need gradients. The model runs forward and backward once. "
        "The computation takes no time.",
        draw=draws("2.28", (2, 4, 8), K=[6, 12, 24], C=[512, 1024], f=[0, 2, 4], n=[2, 32]),
        prepare=_norms,
        quantities=(
            collectives(lambda c: 2 * (c["K"] - c["f"]), "2·(K - f): one each way"),
            bytes_sent(
                lambda c: (
                    2 * (c["W"] - 1) / c["W"] * (c["K"] - c["f"]) * (_forward(c) + _backward(c))
                ),
                "2(W-1)/W·(K - f)·(8·(2C + 1) + 8·C): the rows do not count",
            ),
            clocked(
                _seconds,
                formula="(K - f)·(2·launch + 4(W-1)·α + 2(W-1)/W·(8·(2C + 1) + 8·C)·β)",
            ),
        ),
        doubled="The same collectives; each has nearly twice as many steps, so it takes nearly "
        "twice as long, while the bytes hardly grow.",
    ),
)
