"""Checkpoints in memory, for checks that need no disk."""

from __future__ import annotations

from types import SimpleNamespace


def fake_saved(trees, step: int = 7, shared=None):
    """A checkpoint in memory that notes who is read."""
    reads: list[int] = []

    def own(rank: int):
        reads.append(rank)
        return trees[rank]

    saved = SimpleNamespace(
        step=step, shared=shared or {}, metadata={}, world_size=len(trees), own=own, skipped=()
    )
    return saved, reads
