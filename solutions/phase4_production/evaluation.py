"""Evaluation that is exact and the same on every rank: loss, top-1 and top-5.

Ranks have shards of different size, and images that can't be read count nowhere. So every rank adds
up sums and a count, the ranks add up theirs, and the division comes last. A mean of means would
give the images of a small shard too much weight. Sums are float64, in which counts are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .image_batches import Batch
from .image_folder import DataError


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Over all readable images, each counted once; the same on every rank."""

    val_loss: float
    top1: float
    top5: float
    images: int


def sums_of(logits: Tensor, targets: Tensor) -> Tensor:
    """(4,) float64: summed cross-entropy, right at the first guess, among five, number of images.

    ``logits`` (n, classes), ``targets`` (n,); rows with target IGNORED count nowhere.
    """
    counts = targets != IGNORED
    logits, targets = logits[counts].double(), targets[counts]
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    right = guesses == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([loss, right[:, 0].sum(), right.sum(), counts.sum()])


@torch.no_grad()
def evaluate(
    net: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    prepare: Callable[[Tensor], Tensor],
    surroundings: AbstractContextManager[object],
) -> Evaluation:
    """``net`` in eval mode on this rank's ``batches``, equally many on every rank; collective.

    ``prepare`` makes the model's input of the images; the model runs inside ``surroundings``.
    Raises DataError on every rank if there is no readable image.
    """
    was_training = net.training
    net.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    try:
        for batch in batches:
            with surroundings:
                logits = net(prepare(batch.images))
            sums += sums_of(logits, batch.targets.to(device))
    finally:
        net.train(was_training)
    dist.all_reduce(sums)
    loss, top1, top5, count = sums.tolist()
    if not count:
        raise DataError("no image to evaluate on can be read")
    return Evaluation(
        val_loss=loss / count, top1=top1 / count, top5=top5 / count, images=int(count)
    )
