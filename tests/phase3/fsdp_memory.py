"""How much memory a rank may hold while it trains a stack of equal units: for 3.15 and 3.32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlab.grading import fail
from tests.phase3.fsdp_models import DEPTH, WHOLE


def expect_within(results: Sequence[Mapping[str, int]], limits: Mapping[str, float]) -> None:
    """No rank has more bytes of tensors than the limit of a point; points may be missing."""
    for rank, points in enumerate(results):
        for point, limit in limits.items():
            if points.get(point, 0) > limit:
                fail(
                    f"{point}: rank {rank} has {points[point]:,} B of tensors, expected at most "
                    f"{limit:,.0f} B (all {DEPTH} units: {WHOLE:,} B). Full parameters or "
                    "gradients of other units were not freed",
                    cause="never-freed",
                    rank=rank,
                )
