"""Data and loaders that the checks of training and of evaluation share."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from distlab.ranks.context import RankContext


def data_of(seed: int, n: int) -> TensorDataset:
    """``n`` samples of six features and three classes, drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (n,), generator=generator))


def loader_of(
    impl: Any,
    ctx: RankContext,
    dataset: Dataset[Any],
    batch: int,
    seed: int,
    remainder: str = "keep",
    **kwargs: Any,
) -> Any:
    """The implementation's own loader of this rank's share."""
    return impl.module("data_loader").build_loader(
        dataset,
        rank=ctx.rank,
        world_size=ctx.world_size,
        global_batch_size=batch,
        seed=seed,
        remainder=remainder,
        **kwargs,
    )
