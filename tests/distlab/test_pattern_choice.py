"""A choice by α and β for a size is right where one line for all sizes is wrong."""

from __future__ import annotations

from solutions.phase3_multi_node.allreduce_choice import Timing, choose, fit, for_size

SIZES = [4, 4_000, 400_000, 4_000_000, 40_000_000, 100_000_000]


def bent(pattern: str, nbytes: int) -> float:
    """Seconds on two ranks. Halving and doubling sends fewer short messages and is a little faster,
    until its buffer is too large for the allocator to keep: then each call gets new pages."""
    if pattern == "ring":
        return 4e-4 + 1.5e-9 * nbytes
    return (3e-4 + 1.4e-9 * nbytes) * (1.6 if nbytes > 64_000_000 else 1)


def measured() -> list[Timing]:
    """What ``measure`` finds there, and the times of one rank alone."""
    patterns = ("halving_doubling", "ring")
    several = [Timing(p, 2, n, bent(p, n)) for n in SIZES for p in patterns]
    return several + [Timing(p, 1, n, 1e-9) for n in (1, 10**8) for p in patterns]


def fastest(nbytes: int) -> str:
    return min("halving_doubling", "ring", key=lambda pattern: bent(pattern, nbytes))


def test_the_smallest_size_and_the_nearest_one_are_kept():
    asked = {0: 4_000, 4: 4_000, 300_000: 400_000, 1_500_000: 4_000_000, 10**9: 100_000_000}
    for nbytes, near in asked.items():
        kept = for_size(measured(), nbytes)
        assert kept == [t for t in measured() if t.nbytes in (4, near) and t.world_size == 2]


def test_the_fastest_is_chosen_at_every_measured_size():
    chosen = {n: choose(2, n, fit(for_size(measured(), n))) for n in SIZES}
    assert chosen == {n: fastest(n) for n in SIZES}


def test_one_line_for_all_sizes_is_wrong_there():
    """Or the test above would hold without ``for_size``."""
    links = fit(measured())
    assert {n: choose(2, n, links) for n in SIZES} != {n: fastest(n) for n in SIZES}
