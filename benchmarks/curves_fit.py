"""The exponent of growth of a measured curve, and of the cost formula that is fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from .curve_programs import Curve


@dataclass(frozen=True)
class Growth:
    """Exponents of y = c·x^e over a range of x; of the measured y also over the starts.

    Attributes:
        measured: of the medians.
        low, high: least and most of single starts.
        formula: of the formula's y at the same x.
        constants: those of the formula, in seconds.
        predicted: the formula's y.
        error: median of the errors of the formula, relative to the measured y.
    """

    measured: float
    low: float
    high: float
    formula: float
    constants: tuple[float, ...]
    predicted: tuple[float, ...]
    error: float


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the straight line through the points on logarithmic axes."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def fitted(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Constants >= 0 with the least squares of relative errors of Σ constant·term."""
    rows, taken = np.asarray(terms, dtype=float), np.asarray(seconds, dtype=float)
    scale = np.maximum(rows.max(axis=0), 1e-30)  # bytes are millions: the solver wants ones
    found, _ = nnls(rows / scale / taken[:, None], np.ones_like(taken))
    return tuple(float(c) for c in found / scale)


def growth(
    x: Sequence[float], starts: Sequence[Sequence[float]], terms: Sequence[Sequence[float]]
) -> Growth:
    """``starts``: for each x the seconds of all starts; ``terms``: the formula's, for each x."""
    medians = [float(np.median(each)) for each in starts]
    constants = fitted(terms, medians)
    predicted = tuple(float(np.dot(row, constants)) for row in terms)
    single = [exponent(x, each) for each in zip(*starts, strict=True)]
    errors = [abs(p / m - 1) for p, m in zip(predicted, medians, strict=True)]
    return Growth(
        measured=exponent(x, medians),
        low=min(single),
        high=max(single),
        formula=exponent(x, predicted),
        constants=constants,
        predicted=predicted,
        error=float(np.median(errors)),
    )


@dataclass(frozen=True)
class Measured:
    """A curve with its numbers."""

    curve: Curve
    x: tuple[int, ...]
    starts: tuple[tuple[float, ...], ...]
    sent: tuple[int, ...]

    @property
    def growth(self) -> Growth:
        """Exponents of the time."""
        return growth(self.x, self.starts, [self.curve.terms(s) for s in self.curve.points])

    @property
    def off(self) -> float:
        """Largest deviation of the bytes from the formula."""
        wanted = map(self.curve.sent, self.curve.points)
        return max(abs(got / want - 1) for got, want in zip(self.sent, wanted, strict=True))
