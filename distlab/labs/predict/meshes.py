"""Predictions for a mesh: what a step sums along which axes, and what a rank writes."""

from __future__ import annotations

import random

import torch
from torch import nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, machine_of
from .models import FLOAT, layer_bytes
from .scene import Found, Scene, Work, bytes_sent, clocked, collectives, held, ring_seconds

NORM = 8  # bytes of the sum of squares


def _drawn(random_: random.Random) -> Case:
    cluster, spread = machine_of(random_)
    d, t = random_.choice([2, 3, 4]), random_.choice([2, 4])
    sizes = {"W": d * t, "d": d, "t": t}
    sizes |= {"K": random_.choice([4, 6, 8]), "D": random_.choice([96, 144, 192])}
    return Case("3.33", cluster, sizes, spread)


def _stepped(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    size, grid = case["D"], impl.Grid({"data": case["d"], "tensor": case["t"]}, ["data"])
    layout = {}
    for layer in range(case["K"]):
        layout[f"{layer}.weight"] = impl.Spec(shape=[size, size], cut={"tensor": 0})
        layout[f"{layer}.gain"] = impl.Spec(shape=[size], partial=["tensor"])
    mesh, own = impl.Mesh(grid, layout), {}
    for name, spec in layout.items():
        own[name] = nn.Parameter(torch.ones([end - at for at, end in spec.bounds(grid, ctx.rank)]))
        own[name].grad = torch.ones_like(own[name])

    def work() -> Found:
        mesh.reduce_gradients(own)
        mesh.clip(own, 1.0)
        return {"written": float(sum(piece["values"].nbytes for piece in mesh.pieces(own)))}

    return work


def _cut(case: Case) -> float:
    """A rank's blocks of the weights, in bytes."""
    return case["K"] * layer_bytes(case) / case["t"]


def _copied(case: Case) -> int:
    return case["K"] * case["D"] * FLOAT


def _seconds(case: Case) -> float:
    along = ring_seconds(case, _cut(case), ranks=case["d"])
    return along + ring_seconds(case, _copied(case)) + ring_seconds(case, NORM)


def _sent(case: Case) -> float:
    d, w = case["d"], case["W"]
    return 2 * (d - 1) / d * _cut(case) + 2 * (w - 1) / w * (_copied(case) + NORM)


SCENES = (
    Scene(
        exercise="3.33",
        tells="W = {W} ranks are a mesh with the axes data, of d = {d} ranks, and tensor, of "
        "t = {t}. K = {K} layers have a weight of {D} x {D} float32 numbers each, which tensor "
        "cuts, and a gain of {D}, which all ranks copy. Sequence parallelism makes the gains' "
        "gradients partial on tensor. Backward has run. The mesh reduces the gradients, clips "
        "them, and collects the pieces of a checkpoint. The computation takes no time.",
        draw=_drawn,
        prepare=_stepped,
        quantities=(
            collectives(lambda c: 3, "3: the weights, the gains, and the norm"),
            bytes_sent(
                _sent,
                "2(d-1)/d·4·K·D²/t + 2(W-1)/W·(4·K·D + 8)",
            ),
            clocked(
                _seconds,
                formula="3·launch + (2(d-1) + 4(W-1))·α + the bytes·β",
            ),
            held(
                "written",
                lambda c: _cut(c) + _copied(c),
                "4·K·(D²/t + D): rank 0 is the first holder of all its blocks",
                asks="bytes of rank 0's pieces",
                by="state",
            ),
        ),
        doubled="With twice as many data ranks it is the same three collectives. A data line has "
        "nearly twice as many steps, and its bytes grow by half at most. Rank 0 writes the same.",
    ),
)
