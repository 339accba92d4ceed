"""Evaluation that is exact and the same on every rank.

Ranks have shards of different size, and samples that can't be read count nowhere. So every rank
adds up sums and a count, the ranks add up theirs, and the division comes last. A mean of means
would give the samples of a small shard too much weight. Sums are float64, in which counts are
exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from .batches import Batch, DataError
from .engine import Engine
from .task import Evaluation, Task


@torch.no_grad()
def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    task: Task,
    surroundings: AbstractContextManager[object],
) -> Evaluation:
    """The model in eval mode on this rank's ``batches``, equally many on every rank; collective.

    The model runs inside ``surroundings``. Raises DataError on every rank if no sample is readable.
    """
    was_training = engine.net.training
    engine.net.eval()
    parts = (task.part(batch, device) for batch in batches)
    try:
        found = [engine.sums(part, task, surroundings) for part in parts]
    finally:
        engine.net.train(was_training)
    sums = torch.stack(found).sum(0)
    dist.all_reduce(sums)
    *_, count = numbers = sums.tolist()
    if not count:
        raise DataError(f"none of the {task.unit} to evaluate on can be read")
    return task.evaluation(numbers)
