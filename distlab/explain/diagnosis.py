"""Explain a wrong tensor: try the formulas of the known mistakes and name the one that fits.

A rule (``mistakes.RULES``) is a formula for what ``got`` would be after one mistake. It explains
only if it gives *all* elements within tolerance, and if it differs from ``want``. When all ranks
hold the same values, "only rank 0's" is no explanation. Rules go from specific to generic, and the
first that fits is named. An exercise adds its own rules with ``rules=``; they come first. If no
formula fits, the cause is "wrong", and no mistake is guessed.

The tolerance follows the rounding error of a sum. A sum of n terms in any order, with unit roundoff
u = eps/2, is off by at most g(n-1) * sum |x_i|, with g(k) = k u / (1 - k u). So two right programs
differ by no more than 2 g(n-1), about n * eps. Source: Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed. 2002, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .case import Case, Diagnosis, Rule, _close, magnitude
from .mistakes import RULES


def tolerance(dtype: torch.dtype, terms: int = 1) -> tuple[float, float]:
    """(rtol, atol) for values of order one that are sums of ``terms`` terms in ``dtype``.

    Zero for integers. The bound n * eps (see above) is for the sum alone. Each term, such as a
    gradient, has a few rounding errors of its own. So 8 times the bound is allowed. In half
    precision that would accept a missing rank. There the terms are made in float32, and twice the
    bound must be enough.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    eps = torch.finfo(dtype).eps
    slack = (8 if eps < 1e-4 else 2) * max(1, terms) * eps
    return slack, slack


def explain(
    got: Tensor,
    want: Tensor,
    *,
    contributions: Sequence[Tensor] | None = None,
    before: Tensor | None = None,
    weights: Sequence[float] | None = None,
    bias: Tensor | None = None,
    chunks: int | None = None,
    rank: int | None = None,
    rules: Sequence[Rule] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> Diagnosis | None:
    """None if ``got`` equals ``want`` to rounding, else the formula that explains it.

    ``contributions``: the tensor of each rank. ``weights``: its samples, for weighted means.
    ``before``: the tensor before the call. ``bias``: a summand that may be in it several times.
    ``chunks``: number of chunks of the flat tensor. ``rank``: the rank that has ``got``.
    """
    other = _other_kind(got, want)
    if other is not None:
        return other
    parts = tuple(map(_wide, () if contributions is None else contributions))
    shares = () if weights is None else tuple(map(float, weights))
    if shares and len(shares) != len(parts):
        raise ValueError(f"{len(shares)} weights for {len(parts)} contributions")
    least_r, least_a = tolerance(want.dtype, len(parts))
    fit_r, fit_a = tolerance(want.dtype, math.ceil(math.sqrt(len(parts))))
    wide_got, wide_want = _wide(got), _wide(want)
    scale = _scale(wide_want, parts)
    r = least_r if rtol is None else rtol
    a = least_a * scale if atol is None else atol
    exact = not (want.dtype.is_floating_point or want.dtype.is_complex) and r == a == 0
    if torch.equal(got.cpu(), want.cpu()) if exact else _close(wide_got, wide_want, r, a):
        return None
    case = Case(
        wide_got,
        wide_want,
        parts,
        shares,
        None if before is None else _wide(before),
        None if bias is None else _wide(bias),
        chunks or 0,
        rank,
        max(rtol or 0.0, fit_r),
        max(atol or 0.0, fit_a * scale),
    )
    found = (rule(case) for rule in (*rules, *RULES))
    return next((diagnosis for diagnosis in found if diagnosis is not None), _unexplained(case))


def _other_kind(got: Tensor, want: Tensor) -> Diagnosis | None:
    """Another shape or dtype: no formula needs to be tried."""
    if got.shape != want.shape:
        text = f"the shape is {tuple(got.shape)}, expected {tuple(want.shape)}"
        return Diagnosis("shape", text)
    if got.dtype != want.dtype:
        return Diagnosis("dtype", f"the dtype is {got.dtype}, expected {want.dtype}")
    return None


def _wide(tensor: Tensor) -> Tensor:
    """In float64 on the CPU; a complex tensor as its real and imaginary parts."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _scale(want: Tensor, parts: tuple[Tensor, ...]) -> float:
    """The scale of rounding errors: the largest sum (or mean) of the terms' absolute values."""
    if not parts or any(p.shape != want.shape for p in parts):
        return magnitude(want)
    total = torch.stack(parts).sum(0)
    is_sum = magnitude(total - want) <= magnitude(total / len(parts) - want)
    terms = magnitude(torch.stack(parts).abs().sum(0))
    return max(magnitude(want), terms if is_sum else terms / len(parts))


def _unexplained(case: Case) -> Diagnosis:
    """The diagnosis if no formula fits: how many elements are wrong, and which is worst."""
    off = (case.got - case.want).abs().flatten()
    wrong = off > case.atol + case.rtol * case.want.abs().flatten()
    wrong |= off.isnan() & ~(case.got.isnan() & case.want.isnan()).flatten()
    wrong = wrong if wrong.any() else off > 0
    if not wrong.any():
        return Diagnosis("wrong", "large integers differ in their last digits")
    count = f"{int(wrong.sum())} of {off.numel()} elements are wrong"
    worst = int(off.nan_to_num(-1.0, -1.0, -1.0).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), case.got.shape)]
    here, there = (float(t.flatten()[worst]) for t in (case.got, case.want))
    return Diagnosis(
        "wrong",
        f"{count}, by up to {abs(here - there):.6g} (element {index} is {here:.6g} instead of "
        f"{there:.6g}); no known mistake explains it",
    )
