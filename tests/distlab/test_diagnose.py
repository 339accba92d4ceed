"""The diagnosis names the mistake that was made, for many shapes, dtypes and seeds."""

from __future__ import annotations

import pytest
import torch

from distlab.diagnose import Case, Diagnosis, explain, tolerance

DTYPES = [torch.float32, torch.float64]


def parts_of(seed: int, world_size: int, dtype: torch.dtype, n: int = 24) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator, dtype=dtype) for _ in range(world_size)]


MISTAKES = {
    "summed": lambda parts, mean: sum(parts),
    "divided-twice": lambda parts, mean: mean / len(parts),
    "missing-rank": lambda parts, mean: mean - parts[1] / len(parts),
    "doubled-rank": lambda parts, mean: mean + parts[2] / len(parts),
    "only-own": lambda parts, mean: parts[2],
    "rank-0-only": lambda parts, mean: parts[0],
    "sign": lambda parts, mean: -mean,
    "scaled": lambda parts, mean: 2.5 * mean,
    "zeros": lambda parts, mean: torch.zeros_like(mean),
    "permuted": lambda parts, mean: mean.flip(0),
    "nan": lambda parts, mean: torch.where(torch.arange(len(mean)) == 3, torch.nan, mean),
    "wrong": lambda parts, mean: mean + torch.linspace(1, 2, len(mean), dtype=mean.dtype) ** 2,
    "shape": lambda parts, mean: mean[:-1],
    "dtype": lambda parts, mean: mean.to(torch.float16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cause", MISTAKES)
def test_the_mistake_is_named(cause: str, seed: int, dtype: torch.dtype) -> None:
    parts = parts_of(seed, 3 + seed % 3, dtype)
    mean = torch.stack(parts).mean(0)
    found = explain(MISTAKES[cause](parts, mean), mean, contributions=parts, rank=2)
    assert found is not None
    assert found.cause == cause
    assert found.sentence


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_rounding_is_no_mistake(world_size: int, dtype: torch.dtype) -> None:
    parts = [p.to(dtype) for p in parts_of(world_size, world_size, torch.float64)]
    forward = sum(parts[1:], parts[0]) / world_size
    backward = sum(parts[-2::-1], parts[-1]) / world_size
    assert explain(forward, backward, contributions=parts) is None


def test_unchanged_comes_before_the_other_explanations() -> None:
    parts = parts_of(0, 3, torch.float32)
    found = explain(parts[1], sum(parts), contributions=parts, before=parts[1], rank=1)
    assert found is not None
    assert found.cause == "unchanged"


def test_plain_mean_of_uneven_ranks() -> None:
    parts, weights = parts_of(1, 3, torch.float64), [4, 1, 2]
    want = sum(w * p for w, p in zip(weights, parts, strict=True)) / 7
    found = explain(torch.stack(parts).mean(0), want, contributions=parts, weights=weights)
    assert found is not None
    assert found.cause == "unweighted-mean"
    missing = explain(want - 1 / 7 * parts[1], want, contributions=parts, weights=weights)
    assert missing is not None
    assert "rank 1" in missing.sentence


def test_bias_counted_on_every_rank() -> None:
    bias = torch.randn(8)
    want = torch.randn(5, 8)
    found = explain(want + 3 * bias, want, bias=bias)
    assert found is not None
    assert (found.cause, "4 times" in found.sentence) == ("bias-counted", True)


def test_chunks_are_named() -> None:
    parts = parts_of(3, 4, torch.float32, 10)
    want = sum(parts)
    chunks = list(want.tensor_split(4))
    lacking = torch.cat([*chunks[:2], chunks[2] - parts[3].tensor_split(4)[2], chunks[3]])
    found = explain(lacking, want, contributions=parts, chunks=4)
    assert found is not None
    assert (found.cause, found.sentence) == ("chunk-partial", "chunk 2 lacks rank 3's contribution")
    moved = torch.cat([chunks[1], chunks[0], *chunks[2:]])
    found = explain(moved, want, contributions=parts, chunks=4)
    assert found is not None
    assert (found.cause, "chunk 0" in found.sentence) == ("chunk-misplaced", True)


def test_integers_must_be_exact() -> None:
    want = torch.tensor([1, 2, 3])
    assert explain(want.clone(), want) is None
    found = explain(want * 4, want, contributions=[want] * 4)
    assert found is not None
    assert found.cause == "summed"
    assert tolerance(torch.int64, 100) == (0.0, 0.0)


def test_empty_tensors_are_equal() -> None:
    assert explain(torch.empty(0), torch.empty(0)) is None


def test_rules_of_an_exercise_come_first() -> None:
    def shifted(case: Case) -> Diagnosis | None:
        return Diagnosis("shifted", "one off") if case.fits(case.want + 1) else None

    want = torch.randn(6)
    found = explain(want + 1, want, rules=[shifted])
    assert found == Diagnosis("shifted", "one off")


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_explained_away(seed: int) -> None:
    parts = parts_of(seed, 4, torch.float64)
    noise = torch.randn(24, generator=torch.Generator().manual_seed(seed + 99)).double()
    found = explain(noise, torch.stack(parts).mean(0), contributions=parts, rank=seed % 4)
    assert found is not None
    assert found.cause == "wrong"
