"""The ratio of two contestants over fresh starts of the ranks: median, interval, a word.

Within one start the contestants take turns, so both meet the same moments. Placement, memory and
sockets are the same for a whole start. Rounds inside a start can't average these, so each start
counts as one observation, and the interval is a bootstrap over starts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEAST_STARTS, MOST_STARTS = 9, 21
EQUAL = 0.03  # contestants are called equal if the whole interval is this close to 1
RESAMPLES = 9_999


@dataclass(frozen=True)
class Ratio:
    """Time of one contestant divided by the time of the other."""

    median: float
    low: float
    high: float
    starts: int

    @property
    def word(self) -> str:
        """What the interval tells of the first contestant."""
        if self.low >= 1 - EQUAL and self.high <= 1 + EQUAL:
            return "equal"
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "unknown"

    @property
    def told(self) -> bool:
        """Whether more starts are of no use: the interval is narrow enough for the word "equal", or
        there are as many as are made. Where the interval lies does not matter: to stop at the first
        interval that leaves out 1 would make one in four equal contestants "faster" or "slower".
        """
        narrow = self.high - self.low <= EQUAL * self.median
        return self.starts >= MOST_STARTS or (self.starts >= LEAST_STARTS and narrow)

    def __str__(self) -> str:
        digits = 2 if self.median >= 0.1 else 3
        median, low, high = (f"{n:.{digits}f}" for n in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}] {self.word}"


def of_start(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of one start: the median over its rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def over_starts(ratios: Sequence[float]) -> Ratio:
    """Median and 95 % interval of the ratios of fresh starts.

    Percentiles of bootstrapped medians are too narrow for few observations: with 7 of them a "95 %"
    interval holds the true median in 87 % of cases. So the percentiles are moved outwards as by
    Hesterberg 2015, "What Teachers Should Know about the Bootstrap", section 5.2 (expanded
    percentile interval).
    """
    found, count = np.asarray(ratios, dtype=float), len(ratios)
    median = float(np.median(found))
    if count < 2:
        return Ratio(median, -math.inf, math.inf, count)
    edge = float(stats.norm.cdf(stats.t.ppf(0.025, count - 1) * math.sqrt(count / (count - 1))))
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(np.median(found[drawn], axis=1), [edge, 1 - edge])
    return Ratio(median, float(low), float(high), count)
