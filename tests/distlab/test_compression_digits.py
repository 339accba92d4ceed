"""Compressors on real training: as accurate as without, for fifty times fewer bytes."""

from __future__ import annotations

import pytest

from benchmarks.compression_digits import COMPRESSORS, Run, train

pytestmark = pytest.mark.verdict

POINTS = 0.005  # of accuracy
FEWER = 50


@pytest.fixture(scope="module")
def plain() -> Run:
    return train(COMPRESSORS["none"])


@pytest.mark.parametrize("name", ["Top-K, 1 %", "PowerSGD, rank 2"])
def test_as_accurate_with_fifty_times_fewer_bytes(name: str, plain: Run) -> None:
    found = train(COMPRESSORS[name])
    assert plain.sent / found.sent >= FEWER
    assert found.accuracy >= plain.accuracy - POINTS
    assert plain.accuracy > 0.96
