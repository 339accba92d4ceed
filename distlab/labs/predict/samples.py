"""Predictions for samples: which rank trains on how many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import MODEL, drawn, layer_bytes, layers, model_bytes
from .scene import Found, Prepare, Quantity, Scene, Work, bytes_sent, collectives, held


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


def _uneven(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    model = layers(case)
    limit = case["k"] * layer_bytes(case)
    wrapped = impl.UnevenDDP(model, bucket_bytes=limit, first_bucket_bytes=limit)
    own = [torch.ones(2, case["D"])] * (case["a"] if ctx.rank == 0 else case["m"])
    for _ in range(2):  # the order of the gradients is learned
        wrapped(torch.ones(2, case["D"])).sum().backward()

    def work() -> Found:
        had = []
        with wrapped.join(own) as batches:
            for batch in batches:
                had.append(batch is not None)
                if batch is None:
                    wrapped.shadow()
                else:
                    wrapped(batch).sum().backward()
        return {"steps": float(len(had)), "trained": float(sum(had))}

    return work


def _messages(case: Case) -> int:
    """In a join: of each step the buckets and the weights, and once more the weights."""
    return case["m"] * (-(-case["K"] // case["k"]) + 1) + 1


def _shadowed(results: Sequence[Found]) -> float:
    """The share of all ranks' steps in which a rank had no batch."""
    return 1 - sum(v["trained"] for v in results) / sum(v["steps"] for v in results)


UNEVEN = Scene(
    exercise="3.31",
    tells=f"{MODEL}. Each bucket has room for k = {{k}} of the layers. Rank 0 has {{a}} batches, "
    "every other rank has m = {m}. They train in a join, without agreement on missing gradients.",
    draw=lambda random_: drawn("3.31", random_, k=[1, 2, 3], m=[4, 5, 8], a=[1, 2, 3]),
    prepare=_uneven,
    quantities=(
        collectives(_messages, "m·(⌈K/k⌉ + 1) + 1: who has a batch is asked once more at the end"),
        bytes_sent(
            lambda c: c["m"] * 2 * (c["W"] - 1) / c["W"] * model_bytes(c),
            "m·2(W-1)/W·P, also for a rank that shadows",
            why="1 %: each question who has a batch takes 8 bytes per rank",
        ),
        held(
            "shadowed",
            lambda c: (c["m"] - c["a"]) / (c["W"] * c["m"]),
            "1 - Σ n_r / (W·max n_r)",
            asks="the share of all ranks' steps that are only shadowed (0 to 1)",
            unit="share",
            answers={"loop": lambda seen: _shadowed(seen.real)},
        ),
    ),
    doubled="The same collectives; only rank 0 shadows, so the share becomes half as large.",
)


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
    UNEVEN,
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
