"""A wrong tensor and the facts about its computation; and the answer of a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Diagnosis:
    """A stable key and one sentence for the learner."""

    cause: str
    sentence: str


@dataclass(frozen=True)
class Case:
    """A wrong tensor and the facts about its computation (all in float64).

    ``rtol`` and ``atol`` are the check's, but at least the rounding error. So a formula is
    recognised also where the check wants exact equality. Rounding errors of either sign grow with
    the root of the number of terms (Higham & Mary 2019). A tolerance for the worst case would fit
    too many tensors in half precision.
    """

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
        """Whether ``formula`` explains ``got`` in every element, and is not just ``want``."""
        if formula is None or formula.shape != self.got.shape:
            return False
        formula = formula.double()
        return self.near(self.got, formula) and not self.near(formula, self.want, 2)

    def best(self, formulas: Iterable[tuple[T, Tensor]]) -> T | None:
        """The key of the formula that explains ``got`` best; None if none does."""
        errors = [(key, magnitude(self.got - f)) for key, f in formulas if self.fits(f)]
        return min(errors, key=lambda e: e[1])[0] if errors else None

    def near(self, a: Tensor, b: Tensor, slack: float = 1.0) -> bool:
        """Whether ``a`` equals ``b`` up to rounding, which grows with the size of ``b``."""
        if a.shape != b.shape:
            return False
        atol = max(self.atol, self.rtol * magnitude(b))
        return _close(a, b, 2 * slack * self.rtol, 2 * slack * atol)

    def telling(self, formulas: int) -> bool:
        """Whether one of so many formulas would hardly fit by chance.

        A formula with a free number per element fits an element to a relative ``rtol`` with about
        that probability. In bfloat16 a few elements soon fit by chance; in float32 two elements are
        enough.
        """
        chance = min(1.0, 4 * self.rtol) ** self.got.numel()
        return formulas * chance < 1e-3

    @property
    def world_size(self) -> int:
        """The number of contributions."""
        return len(self.contributions)

    @cached_property
    def combined(self) -> str:
        """How the contributions make the right tensor: ``sum``, ``mean``, ``weighted`` or none."""
        if not self.contributions or any(c.shape != self.want.shape for c in self.contributions):
            return ""
        total = torch.stack(self.contributions).sum(0)
        formulas = {"sum": total, "mean": total / self.world_size}
        if self.weights and sum(self.weights):
            formulas = {"weighted": self.weighted(range(self.world_size)), **formulas}
        return next((name for name, f in formulas.items() if self.near(f, self.want)), "")

    def weighted(self, ranks: Sequence[int]) -> Tensor:
        """The weighted mean over ``ranks``, divided by the weights of all."""
        parts = [self.weights[r] * self.contributions[r] for r in ranks]
        return torch.stack(parts).sum(0) / sum(self.weights)

    def share(self, rank: int) -> Tensor:
        """The summand of ``rank`` in the right tensor."""
        if self.combined == "weighted":
            return self.weighted([rank])
        return self.contributions[rank] / (1 if self.combined == "sum" else self.world_size)


Rule = Callable[[Case], "Diagnosis | None"]


def magnitude(tensor: Tensor) -> float:
    """The largest finite absolute value; 0 if there is none."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _close(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
