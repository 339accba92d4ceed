"""The 8-bit product of phase 2 against ``torch._scaled_mm``, on operands that are 8 bits already.

On a CPU both restore the operands and multiply in float32. torch has no layer of its own: those of
torchao and of the Transformer Engine need a GPU. Results are compared before anything is timed.
"""

from __future__ import annotations

from functools import partial

import torch

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.low_precision import (
    E4M3,
    Float8,
    largest_in,
    multiply,
    saturate,
    scale_for,
)

from .common import in_turn, milliseconds, seconds
from .pairs import Case, Paired, Start

SIZES = ((256, 256, 256), (512, 1024, 1024), (2048, 1024, 512))


def operand(rows: int, columns: int) -> Float8:
    """Drawn numbers in 8 bits, with one scale."""
    x = torch.randn(rows, columns)
    scale = scale_for(largest_in(x), E4M3)
    return Float8(saturate(x * scale, E4M3), scale.reciprocal())


def compare(n: int, k: int, m: int, repeats: int, number: int = 0) -> dict[str, list[float]]:
    """Seconds of each product; fails unless both compute the same."""
    a, b = operand(n, k), operand(m, k)
    dtype = torch.float32
    theirs = partial(
        torch._scaled_mm, a.data, b.data.T, a.inverse_scale, b.inverse_scale, out_dtype=dtype
    )
    ours = partial(multiply, a, b)
    torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-2)
    calls = {"solution": partial(seconds, ours), "_scaled_mm": partial(seconds, theirs)}
    in_turn(calls, 2)
    return in_turn(calls, repeats, number)


def start(size: tuple[int, int, int], rounds: int, number: int) -> Start:
    """One start of a process."""

    def body(_: RankContext) -> dict[str, list[float]]:
        return compare(*size, rounds, number)

    return Start(milliseconds(run_ranks(body, 1, ledger=False, timeout=300)[0]))


PAIRED = Paired(
    title="A product of 8-bit operands",
    labels=("rows × features × outputs",),
    unit="ms",
    pairs=[("solution", "_scaled_mm")],
    cases=lambda: [Case((" × ".join(map(str, size)),), partial(start, size)) for size in SIZES],
    rounds=31,
    note="One process, e4m3 with one scale per operand, float32 out. `torch._scaled_mm` is the "
    "function behind torch's and torchao's 8-bit layers. On a CPU both restore the operands and "
    "multiply them in float32.",
)
