"""Predictions for 8-bit products: what all layers send together, and what forward keeps."""

from __future__ import annotations

import torch
from torch import nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .scene import Found, Scene, Work, bytes_sent, clocked, collectives, held, ring_seconds

SHARE = 12  # bytes of a layer's three amaxes


def _layers(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    width = case["D"]
    layers = [impl.Float8Linear(nn.Linear(width, width)) for _ in range(case["L"])]
    model, x = nn.Sequential(*layers), torch.ones(case["t"], width)
    kept = 0

    def pack(saved: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += saved.numel() if saved.element_size() == 1 else 0
        return saved

    def work() -> Found:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = model(x)
        y.sum().backward()
        impl.update_scales(model)
        return {"kept": float(kept)}

    return work


SCENES = (
    Scene(
        exercise="2.29",
        tells="W = {W} ranks have a model of L = {L} layers with 8-bit products and delayed "
        "scaling. Each layer has {D} features in and {D} out. Each rank has t = {t} rows. Forward, "
        "backward and the update of the scales run once; gradients are not averaged.",
        draw=draws("2.29", (2, 4, 8), L=[8, 16, 24], D=[32, 64], t=[64, 128]),
        prepare=_layers,
        quantities=(
            collectives(lambda c: 1, "1: the amaxes of all layers travel together"),
            bytes_sent(
                lambda c: 2 * (c["W"] - 1) / c["W"] * SHARE * c["L"],
                "2(W-1)/W·12·L: three float32 numbers per layer",
            ),
            held(
                "kept",
                lambda c: c["L"] * (c["t"] + c["D"]) * c["D"],
                "L·(t·D + D·D): one byte per element of input and weight",
                asks="bytes of 8-bit numbers that a rank keeps from forward to backward",
                by="state",
            ),
            clocked(
                lambda c: ring_seconds(c, SHARE * c["L"]),
                formula="launch + 2(W-1)·(α + 12·L/W·β)",
            ),
        ),
        doubled="Still one collective, and less than twice the bytes. What forward keeps stays.",
    ),
)
