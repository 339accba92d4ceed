"""Predictions for layers that are cut over ranks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from ...reference.workloads import Block
from .case import Case, machine_of
from .models import FLOAT
from .scene import (
    Found,
    Prepare,
    Quantity,
    Scene,
    Work,
    bytes_sent,
    clocked,
    collectives,
    held,
    ring_seconds,
)


def _draw_tensor(exercise: str) -> Any:

    def draw(random_: random.Random) -> Case:
        cluster, spread = machine_of(random_)
        sizes = {"W": random_.choice([2, 4, 8]), "D": random_.choice([64, 128])}
        sizes |= {"B": random_.choice([2, 4]), "T": random_.choice([32, 64, 96])}
        return Case(exercise, cluster, sizes, spread)

    return draw


def _activation_bytes(case: Case) -> int:
    return case["B"] * case["T"] * case["D"] * FLOAT


def _input_of(case: Case) -> Tensor:
    return torch.ones(case["B"], case["T"], case["D"], requires_grad=True)


def _mlp(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    size = case["D"]
    up, down = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)
    both = nn.Sequential(impl.ColumnParallelLinear(up), impl.RowParallelLinear(down))

    def work() -> Found:
        both(_input_of(case)).sum().backward()
        return {"weights": float(sum(p.nbytes for p in both.parameters()))}

    return work


def _block(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    share = impl.ParallelBlock(Block(case["D"], 8))
    return lambda: share(_input_of(case)).sum().backward()


def _reduced(times: int) -> tuple[Quantity, ...]:
    return (
        collectives(lambda c: times, f"{times}: half of them in backward"),
        bytes_sent(
            lambda c: times * 2 * (c["W"] - 1) / c["W"] * _activation_bytes(c),
            f"{times}·2(W-1)/W·N, N = 4·B·T·D bytes",
        ),
        clocked(
            lambda c: times * ring_seconds(c, _activation_bytes(c)),
            formula=f"{times}·(launch + 2(W-1)·(α + N/W·β)), N = 4·B·T·D bytes; compute left out",
        ),
    )


WEIGHTS = Quantity(
    name="weights",
    asks="bytes of weights that a rank holds",
    unit="bytes",
    formula="2·4·D·4D/W",
    value=lambda c: 2 * FLOAT * c["D"] * 4 * c["D"] / c["W"],
    answers={"memory": lambda seen: seen.found("weights")},
)


def _tensor(exercise: str, tells: str, prepare: Prepare, *quantities: Quantity) -> Scene:
    return Scene(
        exercise=exercise,
        tells=f"{tells} on {{W}} ranks. The input has B = {{B}}, T = {{T}}, D = {{D}} float32 "
        "numbers; forward and backward run once, and the input needs a gradient.",
        draw=_draw_tensor(exercise),
        prepare=prepare,
        quantities=quantities,
        doubled="The bytes per rank stay near 2N each time; compute halves, so links decide.",
    )


def _pair(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    return lambda: impl.sum_over_ranks(impl.copy_to_ranks(_input_of(case)) * 1.0).sum().backward()


def _words(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    words, vocabulary = torch.arange(case["N"]) % case["V"], case["V"]
    embedding = impl.VocabParallelEmbedding(nn.Embedding(vocabulary, case["D"]))

    def work() -> dict[str, float]:
        x = embedding(words)
        logits = embedding.logits(x)
        loss = impl.vocab_parallel_cross_entropy(logits, words, vocabulary)
        loss.sum().backward()
        return {"logits": float(logits.nbytes)}

    return work


def _draw_words(random_: random.Random) -> Case:
    cluster, spread = machine_of(random_)
    sizes = {"W": random_.choice([2, 4, 8]), "V": random_.choice([512, 1024, 4096])}
    sizes |= {"N": random_.choice([64, 128, 256]), "D": random_.choice([32, 64])}
    return Case("2.16", cluster, sizes, spread)


def _words_bytes(case: Case) -> int:
    """Of the tensors that are summed: two of N·D, three of N numbers."""
    return FLOAT * case["N"] * (2 * case["D"] + 3)


def _sequence(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    share = impl.SequenceParallelBlock(Block(case["D"], 8), regather=bool(case["again"]))
    mine = _input_of(case).detach()[:, : case["T"] // case["W"]].requires_grad_()
    return lambda: share(mine).sum().backward()


def _draw_sequence(random_: random.Random) -> Case:
    case: Case = _draw_tensor("2.18")(random_)
    sizes = case.sizes | {"again": random_.choice([0, 2])}
    return Case(case.exercise, case.cluster, sizes, case.spread)


def _halves(case: Case) -> int:
    return 8 + case["again"]


SCENES = (
    _tensor(
        "2.15",
        "A column-parallel layer (D to 4D) is followed by a row-parallel one (4D to D)",
        _mlp,
        *_reduced(2),
        WEIGHTS,
    ),
    _tensor("2.17", "A transformer block with 8 heads is cut", _block, *_reduced(4)),
    Scene(
        exercise="2.14",
        tells="W = {W} ranks pass a tensor of B·T·D float32 numbers (B = {B}, T = {T}, D = {D}) "
        "through copy_to_ranks, then sum_over_ranks; forward and backward run once.",
        draw=_draw_tensor("2.14"),
        prepare=_pair,
        quantities=_reduced(2),
        doubled="The bytes per rank stay below 2N each time; the latency doubles.",
    ),
    Scene(
        exercise="2.16",
        tells="W = {W} ranks share a vocabulary of V = {V:,} words of width D = {D}. N = {N} "
        "tokens run through embedding, head (the same weight) and loss, forward and backward, in "
        "float32.",
        draw=_draw_words,
        prepare=_words,
        quantities=(
            bytes_sent(
                lambda c: 2 * (c["W"] - 1) / c["W"] * _words_bytes(c),
                "2(W-1)/W·4·(N·D + N·D + 3N)",
            ),
            held(
                "logits",
                lambda c: FLOAT * c["N"] * c["V"] / c["W"],
                "4·N·V/W",
                asks="bytes of the logits that a rank holds",
            ),
            clocked(
                lambda c: (
                    4 * c.machine.launch
                    + 8 * (c["W"] - 1) * c.alpha
                    + 2 * (c["W"] - 1) / c["W"] * _words_bytes(c) * c.beta
                ),
                formula="4·launch + 8(W-1)·α + bytes·β: two all-reduces of N·D numbers, and two in "
                "the loss, of N and 2N",
            ),
        ),
        doubled="Logits halve; the bytes on the wire stay.",
    ),
    Scene(
        exercise="2.18",
        tells="A transformer block with 8 heads is cut over W = {W} ranks, and so is the sequence. "
        "The whole input has B = {B}, T = {T}, D = {D} float32 numbers. Forward and backward run "
        "once; {again} activations are gathered a second time in backward.",
        draw=_draw_sequence,
        prepare=_sequence,
        quantities=(
            collectives(_halves, "8 + those again: all-gathers and reduce-scatters"),
            bytes_sent(
                lambda c: _halves(c) * (c["W"] - 1) / c["W"] * _activation_bytes(c),
                "(8 + again)·(W-1)/W·N, N = 4·B·T·D bytes",
            ),
        ),
        doubled="The bytes per rank stay near N each time; activations halve.",
    ),
)
