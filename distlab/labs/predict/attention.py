"""Predictions for attention to a sequence that is cut over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ...grading.implementation import Implementation
from ...observe.memory import PeakMemory
from ...ranks.context import RankContext
from .case import Case, draws
from .models import FLOAT
from .scene import Found, Scene, Work, bytes_sent, collectives, held, messages

TELLS = (
    "W = {W} ranks have t = {t} positions each of one sequence, with H = {H} heads of queries, "
    "G = {G} heads of keys and values, and d = {d} float32 numbers per head. "
)


def _given(case: Case) -> list[Tensor]:
    """q, k and v of one rank."""
    heads = case["H"], case["G"], case["G"]
    return [torch.ones(1, h, case["t"], case["d"], requires_grad=True) for h in heads]


def _ring(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    q, k, v = _given(case)

    def work() -> Found:
        with PeakMemory() as memory:
            out = impl.ring_attention(q, k, v)
            kept = memory.current - out.untyped_storage().nbytes()
            out.sum().backward()
        return {"kept": float(kept)}

    return work


def _exchanged(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    q, k, v = _given(case)
    layer = impl.Layer(
        batch=1,
        heads=case["H"],
        kv_heads=case["G"],
        features=case["d"],
        itemsize=2,
        ranks=case["W"],
        flops=case["f"] * 1e12,
        alpha=0.0,
        beta=1e-9 / case["link"],
    )

    def work() -> Found:
        impl.all_to_all_attention(q, k, v).sum().backward()
        return {"crossing": impl.crossing(layer)}

    return work


def _crossing(case: Case) -> float:
    """Without latency, for numbers of 2 bytes."""
    excess = (case["G"] * (case["W"] - 1) - case["H"]) / case["H"]
    return 2 * case["f"] * 1e3 / case["link"] * excess


def _block(case: Case) -> int:
    """Bytes of the keys and values of one rank."""
    return 2 * case["G"] * case["t"] * case["d"] * FLOAT


SCENES = (
    Scene(
        exercise="2.22",
        tells=TELLS + "Attention goes round the ring, forward and backward, once.",
        draw=draws("2.22", H=[8], G=[2, 4, 8], t=[16, 32, 64], d=[16, 32]),
        prepare=_ring,
        quantities=(
            messages(
                lambda c: 3 * (c["W"] - 1),
                "3(W-1): blocks forward, blocks and gradients backward",
                answers={"ledger": lambda seen: seen.messages},
            ),
            messages(
                lambda c: 2 * c["W"] - 1,
                "2W-1: W-1 forward, and W backward, as gradients follow one step behind",
                name="rounds",
                asks="messages that follow one another, each of them begun after the one before",
                answers={"clock": lambda seen: seen.rounds},
            ),
            bytes_sent(
                lambda c: 3 * (c["W"] - 1) * _block(c),
                "3(W-1)·2·G·t·d·4",
            ),
            held(
                "kept",
                lambda c: c["H"] * c["t"] * FLOAT,
                "4·H·t: the logarithm of each query's sum of weights",
                asks="bytes that a rank keeps for backward, beside arguments and result",
            ),
        ),
        doubled="A rank with the same t sends twice as many bytes and more, and also has twice the "
        "work for each of its positions.",
    ),
    Scene(
        exercise="2.23",
        tells=TELLS + "They exchange heads for positions and back, forward and backward, once. "
        "For the last question the numbers have 2 bytes, a rank makes f = {f} TFLOP/s, its link "
        "carries {link} GB/s, and messages have no latency.",
        draw=draws(
            "2.23",
            (4, 8),
            H=[8, 16],
            G=[8],
            t=[16, 32, 64],
            d=[16, 32],
            f=[50, 200, 800],
            link=[25, 50, 400],
        ),
        prepare=_exchanged,
        quantities=(
            collectives(lambda c: 4, "4: there and back, forward and backward"),
            bytes_sent(
                lambda c: (
                    2 * (c["W"] - 1) / c["W"] * c["t"] * c["d"] * 2 * (c["H"] + c["G"]) * FLOAT
                ),
                "2·(W-1)/W·4·t·d·(2H + 2G)",
            ),
            held(
                "crossing",
                _crossing,
                "2·f·β·(G·(W-1) - H)/H, β = 1/link",
                asks="positions of the whole sequence from which on a ring is never slower",
                unit="positions",
                by="state",
                tolerance=0.01,
                why="1 %: it is a whole number of positions",
            ),
        ),
        doubled="With the same t, the bytes that a rank sends hardly grow, but the crossing moves "
        "to more than twice the length.",
    ),
)
