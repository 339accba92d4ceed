"""Predictions for samples: which rank trains on how many of them."""

from __future__ import annotations

from typing import Any

import torch

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .scene import Found, Prepare, Quantity, Scene, Work, held


def _share(case: Case) -> int:
    """⌈N/W⌉"""
    return -(-case["N"] // case["W"])


def _sampler(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    mine = impl.ShardedSampler(case["N"], rank=ctx.rank, world_size=case["W"])

    def work() -> Found:
        entries = len(list(mine))
        return {"entries": float(entries), "padding": float(entries * case["W"] - case["N"])}

    return work


def _loader(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    data = torch.utils.data.TensorDataset(torch.zeros(case["N"], case["D"]))
    world, batch = case["W"], case["b"] * case["W"]
    options = {"rank": ctx.rank, "world_size": world, "global_batch_size": batch}

    def work() -> Found:
        beside = impl.build_loader(data, **options, num_workers=case["w"], prefetch=case["p"])
        here = impl.build_loader(data, **options)
        waiting = beside.num_workers * (beside.prefetch_factor or 0)
        first = next(iter(here))[0]
        return {"batches": float(len(here)), "waiting": float(waiting * first.nbytes)}

    return work


def _elastic(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    sampler = impl.ElasticSampler(
        case["N"], global_batch_size=case["B"], rank=ctx.rank, world_size=case["W"]
    )

    def work() -> Found:
        sizes = [len(batch) for batch in sampler]
        return {"steps": float(len(sizes)), "samples": float(max(sizes))}

    return work


def _scene(
    exercise: str, tells: str, prepare: Prepare, doubled: str, *quantities: Quantity, **more: Any
) -> Scene:
    return Scene(
        exercise=exercise,
        tells=tells,
        draw=draws(exercise, **more),
        prepare=prepare,
        quantities=quantities,
        doubled=doubled,
    )


SCENES = (
    _scene(
        "1.1",
        "W = {W} ranks share {N:,} samples; the sampler pads.",
        _sampler,
        "Each rank has half as many samples, and padding may double. The order stays N numbers.",
        held(
            "entries",
            _share,
            "⌈N/W⌉",
            asks="entries of one rank in an epoch",
            unit="entries",
            by="sampler",
        ),
        held(
            "padding",
            lambda c: c["W"] * _share(c) - c["N"],
            "W·⌈N/W⌉ - N",
            asks="entries of all ranks together that are padding",
            unit="entries",
            by="sampler",
        ),
        N=[997, 1000, 1797, 2005],
    ),
    _scene(
        "1.2",
        "W = {W} ranks share {N:,} samples of {D} float32 numbers. A rank's batch has b = {b} "
        "samples. Each rank has {w} worker processes, and each worker holds {p} batches.",
        _loader,
        "Half as many batches per epoch; the memory of a rank's workers stays.",
        held(
            "batches",
            lambda c: -(-_share(c) // c["b"]),
            "⌈⌈N/W⌉/b⌉",
            asks="batches of one rank in an epoch",
            unit="batches",
            by="loader",
        ),
        held(
            "waiting",
            lambda c: c["w"] * c["p"] * c["b"] * c["D"] * 4,
            "workers·prefetch·b·4D",
            asks="bytes of batches that the workers of one rank hold",
            by="loader",
        ),
        N=[1797, 2000],
        D=[64, 3072],
        b=[16, 32],
        w=[2, 4],
        p=[2, 3],
    ),
    _scene(
        "4.18",
        "A run goes on with W = {W} ranks. It has {N:,} samples and global batches of B = {B}.",
        _elastic,
        "The same steps; a rank has half as many samples in each.",
        held(
            "steps",
            lambda c: -(-c["N"] // c["B"]),
            "⌈N/B⌉",
            asks="steps of an epoch",
            unit="steps",
            by="sampler",
        ),
        held(
            "samples",
            lambda c: -(-c["B"] // c["W"]),
            "⌈B/W⌉",
            asks="samples of the busiest rank in a whole batch",
            unit="samples",
            by="sampler",
        ),
        N=[1000, 1797],
        B=[32, 50, 64],
    ),
)
