"""Explain a wrong tensor: try the formulas of the known mistakes and name the one that fits.

Every rule must explain *all* elements within tolerance; rules go from specific to generic, so the
first that fits is the likeliest. An exercise adds its own with ``rules=``; they come first.

The tolerance follows the error of summation: a sum of n terms in precision u is off by at most
(n-1)u relative to the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms,
section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Diagnosis:
    """A stable key and one sentence for the learner."""

    cause: str
    sentence: str


@dataclass(frozen=True)
class Case:
    """A wrong tensor and what is known of how it should have come about (all in float64)."""

    got: Tensor
    want: Tensor
    contributions: tuple[Tensor, ...] = ()
    weights: tuple[float, ...] = ()
    before: Tensor | None = None
    bias: Tensor | None = None
    chunks: int = 0
    rank: int | None = None
    rtol: float = 1e-6
    atol: float = 1e-6

    def fits(self, formula: Tensor | None) -> bool:
        """Whether ``formula`` explains ``got`` in every element."""
        if formula is None or formula.shape != self.got.shape:
            return False
        return torch.allclose(self.got, formula, rtol=4 * self.rtol, atol=4 * self.atol)

    @property
    def world_size(self) -> int:
        """The number of contributions."""
        return len(self.contributions)

    @property
    def combined(self) -> str:
        """How the contributions make the right tensor: ``sum``, ``mean``, ``weighted`` or none."""
        if not self.contributions or self.contributions[0].shape != self.want.shape:
            return ""
        total = torch.stack(self.contributions).sum(0)
        formulas = {"sum": total, "mean": total / self.world_size}
        if self.weights and sum(self.weights):
            formulas = {"weighted": self.weighted(range(self.world_size)), **formulas}
        for name, formula in formulas.items():
            if torch.allclose(formula, self.want, rtol=4 * self.rtol, atol=4 * self.atol):
                return name
        return ""

    def weighted(self, ranks: Sequence[int]) -> Tensor:
        """The weighted mean over ``ranks``, divided by the weights of all."""
        parts = [self.weights[r] * self.contributions[r] for r in ranks]
        return torch.stack(parts).sum(0) / sum(self.weights)

    def share(self, rank: int) -> Tensor:
        """What ``rank`` adds to the right tensor."""
        if self.combined == "weighted":
            return self.weighted([rank])
        return self.contributions[rank] / (1 if self.combined == "sum" else self.world_size)


Rule = Callable[[Case], "Diagnosis | None"]


def tolerance(dtype: torch.dtype, terms: int = 1) -> tuple[float, float]:
    """(rtol, atol) for values of order one that are sums of ``terms`` terms in ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    unit = torch.finfo(dtype).eps
    slack = 8 * max(1, terms) * unit
    return slack, slack


def _of(value: float) -> str:
    return f"{value:.6g}"


def _not_finite(case: Case) -> Diagnosis | None:
    bad = ~torch.isfinite(case.got) & torch.isfinite(case.want)
    if not bad.any():
        return None
    count = int(bad.sum())
    return Diagnosis("nan", f"{count} of {case.got.numel()} elements are nan or infinite")


def _unchanged(case: Case) -> Diagnosis | None:
    if case.before is None or not case.fits(case.before):
        return None
    return Diagnosis("unchanged", "the tensor is unchanged: it still holds the input")


def _zeros(case: Case) -> Diagnosis | None:
    if case.got.any():
        return None
    return Diagnosis("zeros", "every element is zero")


def _own_only(case: Case) -> Diagnosis | None:
    rank = case.rank
    if rank is None or rank >= case.world_size:
        return None
    mine = case.contributions[rank]
    shares = [mine, mine / case.world_size]
    if case.combined == "weighted":
        shares.append(case.share(rank))
    if not any(case.fits(share) for share in shares):
        return None
    return Diagnosis("only-own", f"it is rank {rank}'s own part: nothing from the others is in it")


def _other_rank(case: Case) -> Diagnosis | None:
    for rank, part in enumerate(case.contributions):
        if case.fits(part):
            cause = "rank-0-only" if rank == 0 else "one-rank-only"
            return Diagnosis(cause, f"it equals rank {rank}'s value alone")
    return None


def _constant_ratio(case: Case) -> Diagnosis | None:
    norm = float((case.want * case.want).sum())
    if norm == 0.0 or case.got.numel() == 0:
        return None
    ratio = float((case.got * case.want).sum()) / norm
    if abs(ratio) < 1e-12 or not case.fits(ratio * case.want):
        return None
    w = case.world_size
    if w > 1 and abs(ratio - w) < 1e-3 * w:
        return Diagnosis(
            "summed",
            f"every element is {w} times the right value: "
            f"the sum over the {w} ranks was not divided by the world size",
        )
    for times in (1, 2, 3):
        if w > 1 and abs(ratio * w**times - 1) < 1e-3:
            often = {1: "once", 2: "twice", 3: "three times"}[times]
            return Diagnosis(
                "divided-twice",
                f"every element is 1/{w**times} of the right value: it was divided by the world "
                f"size {often} too often",
            )
    if abs(ratio + 1) < 1e-3:
        return Diagnosis("sign", "every element has the wrong sign")
    return None


def _scaled(case: Case) -> Diagnosis | None:
    """Any other constant ratio; a single element always has one, so it explains nothing."""
    if case.got.numel() < 2 or not case.want.any():
        return None
    ratio = float((case.got * case.want).sum() / (case.want * case.want).sum())
    if abs(ratio) < 1e-12 or not case.fits(ratio * case.want):
        return None
    return Diagnosis("scaled", f"every element is {_of(ratio)} times the right value")


def _missing_or_doubled(case: Case) -> Diagnosis | None:
    if not case.combined or case.world_size < 2:
        return None
    for rank in range(case.world_size):
        share = case.share(rank)
        if case.fits(case.want - share):
            return Diagnosis("missing-rank", f"rank {rank}'s contribution is missing")
        if case.fits(case.want + share):
            return Diagnosis("doubled-rank", f"rank {rank}'s contribution is counted twice")
    return None


def _missing_then_rescaled(case: Case) -> Diagnosis | None:
    """A mean over all ranks but one."""
    if case.combined != "mean" or case.world_size < 3:
        return None
    w = case.world_size
    for rank in range(w):
        rest = (case.want * w - case.contributions[rank]) / (w - 1)
        if case.fits(rest):
            return Diagnosis("missing-rank", f"it is the mean of all ranks but rank {rank}")
    return None


def _unweighted(case: Case) -> Diagnosis | None:
    if case.combined != "weighted":
        return None
    used = [c for c, w in zip(case.contributions, case.weights, strict=True) if w]
    for parts in (list(case.contributions), used):
        if case.fits(torch.stack(parts).mean(0)):
            return Diagnosis(
                "unweighted-mean",
                f"it is the plain mean over {len(parts)} ranks, but they contribute "
                f"{[_of(w) for w in case.weights]} samples: weight each by its share",
            )
    if case.fits(torch.stack(case.contributions).sum(0)):
        return Diagnosis("summed", "the ranks' values are summed and not divided at all")
    by_samples = sum(w * c for w, c in zip(case.weights, case.contributions, strict=True))
    if isinstance(by_samples, Tensor) and case.fits(by_samples):
        return Diagnosis("summed", "the weighted sum was not divided by the number of samples")
    return None


def _bias(case: Case) -> Diagnosis | None:
    if case.bias is None:
        return None
    extra = case.got - case.want
    for times in range(1, 65):
        if case.fits((case.want + times * case.bias).expand_as(case.got)) and bool(extra.any()):
            return Diagnosis("bias-counted", f"the bias is in it {times + 1} times instead of once")
    return None


def _chunks(case: Case) -> Diagnosis | None:
    if case.chunks < 2 or case.got.numel() < case.chunks:
        return None
    got = case.got.flatten().tensor_split(case.chunks)
    want = case.want.flatten().tensor_split(case.chunks)

    def close(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=4 * case.rtol, atol=4 * case.atol)

    wrong = [i for i in range(case.chunks) if not close(got[i], want[i])]
    for i in wrong:
        for j in range(case.chunks):
            if j != i and close(got[i], want[j]):
                return Diagnosis("chunk-misplaced", f"chunk {i} holds what belongs in chunk {j}")
    parts = [c.flatten().tensor_split(case.chunks) for c in case.contributions]
    for i in wrong:
        for rank, part in enumerate(parts):
            share = part[i] / (case.world_size if case.combined == "mean" else 1)
            if close(got[i], want[i] - share):
                return Diagnosis("chunk-partial", f"chunk {i} lacks rank {rank}'s contribution")
    return None


def _permuted(case: Case) -> Diagnosis | None:
    if case.got.numel() < 2:
        return None
    if case.fits(case.want.flatten().flip(0).view_as(case.want)):
        return Diagnosis("permuted", "the right values, in reverse order")
    a, b = case.got.flatten().sort().values, case.want.flatten().sort().values
    if not torch.allclose(a, b, rtol=4 * case.rtol, atol=4 * case.atol):
        return None
    return Diagnosis("permuted", "the right values, in the wrong order")


def _rounding(case: Case) -> Diagnosis | None:
    scale = float(case.want.abs().max()) if case.want.numel() else 0.0
    error = float((case.got - case.want).abs().max())
    if error > 100 * (case.atol + case.rtol * scale) or error > 1e-2 * max(scale, 1e-30):
        return None
    return Diagnosis(
        "rounding",
        f"off by {_of(error)} at most, a little more than rounding explains: "
        "look at the dtype and the order of the sum",
    )


RULES: tuple[Rule, ...] = (
    _not_finite,
    _unchanged,
    _constant_ratio,
    _unweighted,
    _missing_or_doubled,
    _missing_then_rescaled,
    _own_only,
    _other_rank,
    _zeros,
    _scaled,
    _bias,
    _chunks,
    _permuted,
    _rounding,
)


def explain(
    got: Tensor,
    want: Tensor,
    *,
    contributions: Sequence[Tensor] = (),
    weights: Sequence[float] = (),
    before: Tensor | None = None,
    bias: Tensor | None = None,
    chunks: int = 0,
    rank: int | None = None,
    rules: Sequence[Rule] = (),
    rtol: float | None = None,
    atol: float | None = None,
) -> Diagnosis | None:
    """None if ``got`` equals ``want`` to rounding, else the formula that explains it.

    ``contributions``: what each rank put in; ``weights``: its samples, for weighted means;
    ``before``: the tensor before the call; ``bias``: a summand that may be in it several times;
    ``chunks``: number of chunks of the flat tensor; ``rank``: where it was seen.
    """
    if got.shape != want.shape:
        text = f"the shape is {tuple(got.shape)}, expected {tuple(want.shape)}"
        return Diagnosis("shape", text)
    if got.dtype != want.dtype:
        return Diagnosis("dtype", f"the dtype is {got.dtype}, expected {want.dtype}")
    default_r, default_a = tolerance(want.dtype, max(1, len(contributions)))
    r = default_r if rtol is None else rtol
    scale = max([float(t.abs().max()) for t in (want, *contributions) if t.numel()] or [1.0])
    a = default_a * max(scale, 1e-30) if atol is None else atol
    got64, want64 = got.double(), want.double()
    if torch.allclose(got64, want64, rtol=r, atol=a, equal_nan=True):
        return None
    case = Case(
        got64,
        want64,
        tuple(c.double() for c in contributions),
        tuple(map(float, weights)),
        None if before is None else before.double(),
        None if bias is None else bias.double(),
        chunks,
        rank,
        r,
        a,
    )
    for rule in (*rules, *RULES):
        found = rule(case)
        if found is not None:
            return found
    differing = int((~torch.isclose(got64, want64, rtol=r, atol=a)).sum())
    error = float((got64 - want64).abs().max())
    return Diagnosis(
        "wrong",
        f"{differing} of {got.numel()} elements are wrong, by up to {_of(error)}; "
        "no known mistake explains it",
    )
