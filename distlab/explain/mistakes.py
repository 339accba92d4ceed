"""The known mistakes, each a formula for what the tensor would be after it, in order of trial.

A rule is a pure function of a ``Case``; it returns a ``Diagnosis`` or None. Specific rules come
first. To add one for a single exercise, pass it to ``explain`` with ``rules=``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from .case import Case, Diagnosis, Rule, magnitude

MOST_RANKS = 6  # ranks whose subsets are searched: 2^6 formulas
MOST_TIMES = 65  # a bias is looked for
TIMES = {1: "once", 2: "twice", 3: "three times"}


def _number(value: float) -> str:
    return f"{value:.6g}"


def _whose(ranks: Sequence[int]) -> str:
    """``"rank 1's contribution"``, ``"the contributions of ranks 1 and 3"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}'s contribution"
    return f"the contributions of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def not_finite(case: Case) -> Diagnosis | None:
    """nan or infinite where the right tensor is finite, or finite where it is not."""
    bad = ~torch.isfinite(case.got) & torch.isfinite(case.want)
    if bad.any():
        text = f"{int(bad.sum())} of {case.got.numel()} elements are nan or infinite"
        return Diagnosis("nan", text)
    lost = torch.isfinite(case.got) & ~torch.isfinite(case.want)
    if lost.any():
        text = f"{int(lost.sum())} elements should be nan or infinite and are not: one is swallowed"
        return Diagnosis("nan", text)
    return None


def unchanged(case: Case) -> Diagnosis | None:
    """Unchanged: equal to the tensor before the call."""
    if not case.fits(case.before):
        return None
    return Diagnosis("unchanged", "the tensor is unchanged: it still holds the input")


def zeros(case: Case) -> Diagnosis | None:
    """All zeros, and not because this rank's own value is zero."""
    own = case.rank is not None and case.rank < case.world_size and case.contributions[case.rank]
    if case.got.any() or (isinstance(own, Tensor) and not own.any()):
        return None
    return Diagnosis("zeros", "every element is zero")


def power_of_world_size(case: Case) -> Diagnosis | None:
    """Not divided by the world size, or divided too often; or the sign is wrong."""
    w = case.world_size
    powers = [1, -1, -2, -3] if w > 1 else []
    formulas = [(power, case.want * float(w) ** power) for power in powers]
    power = case.best([*formulas, (0, -case.want)])
    if power is None:
        return None
    if power == 0:
        return Diagnosis("sign", "every element has the wrong sign")
    if power == 1:
        return Diagnosis(
            "summed",
            f"every element is exactly {w} times the right value: "
            f"the sum over the {w} ranks was not divided by the world size",
        )
    return Diagnosis(
        "divided-twice",
        f"every element is 1/{w**-power} of the right value: it was divided by the world "
        f"size {TIMES[-power]} too often",
    )


def scaled(case: Case) -> Diagnosis | None:
    """Any other constant factor. A single element always has one, so for it a factor explains
    nothing. Values next to zero are memory that nobody has written."""
    if int(case.want.count_nonzero()) < 2 or not case.telling(1):
        return None
    got, want = (t.nan_to_num(0.0, 0.0, 0.0) for t in (case.got, case.want))
    ratio = float((got * want).sum() / (want * want).sum())
    if abs(ratio) < 1e-20 or abs(ratio - 1) < 1e-5 or not case.fits(ratio * case.want):
        return None
    if case.near(case.got, torch.zeros_like(case.want)):
        return None  # all values are rounding errors: any small factor fits
    return Diagnosis("scaled", f"every element is {_number(ratio)} times the right value")


def unweighted(case: Case) -> Diagnosis | None:
    """The plain mean, or a sum, where ranks hold unequal numbers of samples."""
    if case.combined != "weighted":
        return None
    used = [c for c, w in zip(case.contributions, case.weights, strict=True) if w]
    for parts in (list(case.contributions), used):
        if case.fits(torch.stack(parts).mean(0)):
            return Diagnosis(
                "unweighted-mean",
                f"it is the plain mean over {len(parts)} ranks, but they contribute "
                f"{', '.join(map(_number, case.weights))} samples: weight each by its share",
            )
    if case.fits(torch.stack(case.contributions).sum(0)):
        return Diagnosis("summed", "the ranks' values are summed and not divided at all")
    if case.fits(case.weighted(range(case.world_size)) * sum(case.weights)):
        return Diagnosis("summed", "the weighted sum was not divided by the number of samples")
    return None


def missing_or_doubled(case: Case) -> Diagnosis | None:
    """One rank's share left out or added twice."""
    if not case.combined or case.world_size < 2 or not case.telling(2 * case.world_size):
        return None
    shares = [(rank, case.share(rank)) for rank in range(case.world_size)]
    missing = [(("missing-rank", rank), case.want - share) for rank, share in shares]
    doubled = [(("doubled-rank", rank), case.want + share) for rank, share in shares]
    found = case.best([*missing, *doubled])
    if found is None:
        return None
    cause, rank = found
    how = "missing" if cause == "missing-rank" else "counted twice"
    return Diagnosis(cause, f"{_whose([rank])} is {how}")


def mean_without_one(case: Case) -> Diagnosis | None:
    """A mean over all ranks but one, divided by their number."""
    w = case.world_size
    if case.combined != "mean" or w < 3 or not case.telling(w):
        return None
    parts = enumerate(case.contributions)
    gone = case.best((rank, (case.want * w - part) / (w - 1)) for rank, part in parts)
    if gone is None:
        return None
    return Diagnosis("missing-rank", f"it is the mean of all ranks but rank {gone}")


def own_only(case: Case) -> Diagnosis | None:
    """This rank's own value: nothing was communicated, or nothing of it was used."""
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


def one_rank_only(case: Case) -> Diagnosis | None:
    """Another rank's value."""
    rank = case.best(enumerate(case.contributions))
    if rank is None:
        return None
    cause = "rank-0-only" if rank == 0 else "one-rank-only"
    return Diagnosis(cause, f"it equals rank {rank}'s value alone")


def several_missing(case: Case) -> Diagnosis | None:
    """Two or more ranks' shares left out."""
    w = case.world_size
    if not case.combined or not 3 < w <= MOST_RANKS or not case.telling(2**w):
        return None
    shares = [case.share(rank) for rank in range(w)]
    subsets = [gone for count in range(2, w - 1) for gone in combinations(range(w), count)]
    found = case.best((gone, case.want - sum(shares[r] for r in gone)) for gone in subsets)
    return Diagnosis("missing-rank", f"{_whose(found)} are missing") if found else None


def bias_counted(case: Case) -> Diagnosis | None:
    """The bias added by every rank before the sum, or by none."""
    if case.bias is None:
        return None
    times = case.best((n, case.want + (n - 1) * case.bias) for n in range(MOST_TIMES))
    if times is None:
        return None
    if times == 0:
        return Diagnosis("bias-missing", "the bias is not in it")
    return Diagnosis("bias-counted", f"the bias is in it {times} times instead of once")


def chunk_errors(case: Case) -> Diagnosis | None:
    """Chunks in the wrong position, or without some rank; every wrong chunk must be explained."""
    if case.chunks < 2 or case.got.numel() < case.chunks:
        return None
    got = case.got.flatten().tensor_split(case.chunks)
    want = case.want.flatten().tensor_split(case.chunks)
    wrong = [i for i in range(case.chunks) if not case.near(got[i], want[i])]
    found = [_moved(case, i, got[i], want) or _partial(case, i, got[i], want[i]) for i in wrong]
    reasons = [reason for reason in found if reason is not None]
    if not reasons or len(reasons) < len(wrong):
        return None
    more = f" ({len(wrong)} of {case.chunks} chunks are wrong)" if len(wrong) > 1 else ""
    return Diagnosis(reasons[0].cause, reasons[0].sentence + more)


def _moved(case: Case, i: int, chunk: Tensor, want: Sequence[Tensor]) -> Diagnosis | None:
    for j, other in enumerate(want):
        if j != i and case.near(chunk, other):
            return Diagnosis("chunk-misplaced", f"chunk {i} holds what belongs in chunk {j}")
    return None


def _partial(case: Case, i: int, chunk: Tensor, want: Tensor) -> Diagnosis | None:
    w = case.world_size
    if not case.combined:
        return None
    shares = [case.share(r).flatten().tensor_split(case.chunks)[i] for r in range(w)]
    for count in range(1, w if w <= MOST_RANKS else 2):
        for gone in combinations(range(w), count):
            if case.near(chunk, want - sum(shares[r] for r in gone)):
                return Diagnosis("chunk-partial", f"chunk {i} lacks {_whose(gone)}")
    return None


def permuted(case: Case) -> Diagnosis | None:
    """The right values in another order."""
    if case.got.numel() < 2 or not case.telling(1):
        return None
    if case.fits(case.want.flatten().flip(0).view_as(case.want)):
        return Diagnosis("permuted", "the right values, in reverse order")
    got, want = (t.flatten().sort().values for t in (case.got, case.want))
    # sorted values of any two tensors are near each other, so this formula must fit closely
    if not torch.allclose(got, want, rtol=case.rtol / 2, atol=case.atol / 8, equal_nan=True):
        return None
    if case.near(case.got, case.want):
        return None
    return Diagnosis("permuted", "the right values, in the wrong order")


def rounding(case: Case) -> Diagnosis | None:
    """A little more than rounding: another dtype in between, or a poor order of the sum."""
    size = magnitude(case.want)
    if not torch.equal(torch.isfinite(case.got), torch.isfinite(case.want)):
        return None
    error = magnitude(case.got - case.want)
    near = case.atol and error <= min(100 * (case.atol + case.rtol * size), 1e-2 * size)
    if not near and not (case.atol and case.near(case.got, case.want)):
        return None
    return Diagnosis(
        "rounding",
        f"off by {_number(error)} at most, a little more than rounding explains: "
        "look at the dtype and the order of the sum",
    )


RULES: tuple[Rule, ...] = (
    not_finite,
    unchanged,
    zeros,
    power_of_world_size,
    unweighted,
    missing_or_doubled,
    mean_without_one,
    own_only,
    one_rank_only,
    scaled,
    several_missing,
    bias_counted,
    chunk_errors,
    permuted,
    rounding,
)
