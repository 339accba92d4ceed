"""Measured bandwidth of collectives over size: how far a closed form is from the machine.

A curve has the bus bandwidth of one operator on one number of ranks and nodes. For each of its
sizes the *reach* is the time by the closed form over the measured time. Between two sizes the reach
is interpolated over the logarithm of the size. Beyond the largest size it goes on in the same way,
up to 1, and below the smallest size it stays. Other numbers of ranks have the reach of the nearest
curve for the same operator: one curve inside a node never speaks for several nodes.

Bus bandwidth is what nccl-tests calls so (doc/PERFORMANCE.md): 2(W-1)/W times the bytes of an
all-reduce over its time, (W-1)/W times those of an all-gather or reduce-scatter of all bytes, and
the bytes themselves for a broadcast. The bandwidth of messages ("send") is bytes over time, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

AS_THEY_ARE = ("broadcast", "reduce", "send")  # whose bus bandwidth counts all bytes once
Point = tuple[float, float]  # logarithm of the bytes, reach


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Bus bandwidth in bytes/s by bytes; ``source`` says who measured it.

    The bytes are those that a rank passes in, or has in the end: the more of the two.
    """

    op: str
    ranks: int
    nodes: int
    bandwidth: dict[int, float]
    source: str

    def seconds(self, nbytes: int) -> float:
        """The measured time for a size of the curve."""
        if self.op in AS_THEY_ARE:
            return nbytes / self.bandwidth[nbytes]
        rounds = 2 if self.op == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * nbytes / self.bandwidth[nbytes]


def reach(
    curves: Sequence[Curve],
    op: str,
    nbytes: float,
    ranks: int,
    nodes: int,
    closed_form: Callable[[Curve, float], float],
) -> float:
    """Time by the closed form over the time to expect, 1 without a curve for ``op``.

    ``closed_form(curve, nbytes)`` is the time that it gives for the curve's ranks and nodes.
    """
    known = [c for c in curves if c.op == op and (c.nodes == 1) == (nodes == 1)]
    if not known or nbytes <= 0:
        return 1.0
    nearest = min(known, key=lambda c: (abs(math.log2(c.ranks / ranks)), c.ranks))
    points = [
        (math.log2(size), closed_form(nearest, size) / nearest.seconds(size))
        for size in sorted(nearest.bandwidth)
    ]
    return interpolated(points, math.log2(nbytes))


def interpolated(points: Sequence[Point], at: float) -> float:
    """The reach at a size between, below or beyond the points, which are in order."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x, y), (following, reached) = next((p for p in pairs if at <= p[1][0]), pairs[-1])
    value = y + (reached - y) * (at - x) / (following - x)
    return value if at <= following else max(reached, min(1.0, value))
