"""Checkpoints in memory, for checks that need no disk."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def fake_saved(
    trees: Sequence[Any], step: int = 7, shared: dict[str, Any] | None = None
) -> tuple[SimpleNamespace, list[int]]:
    """A checkpoint in memory that notes who is read."""
    reads: list[int] = []

    def own(rank: int) -> Any:
        reads.append(rank)
        return trees[rank]

    saved = SimpleNamespace(
        step=step, shared=shared or {}, metadata={}, world_size=len(trees), own=own, skipped=()
    )
    return saved, reads
