"""The recipe that makes large-batch training work, beside the gradients.

- *Linear scaling and warm-up* (exercise 2.4), then a cosine to zero.
- *Label smoothing*: the target is 1-ε on the true class and ε/C on all C.
- *Mixup*: images λ·x_i + (1-λ)·x_j, and their losses in the same proportion, λ from Beta(α, α).
- *EMA*: evaluation takes an average of the weights that forgets, d·average + (1-d)·weights.

Sources: Goyal et al. 2017 (arXiv 1706.02677); Loshchilov & Hutter 2017 (arXiv 1608.03983), the
cosine; Szegedy et al. 2016 (arXiv 1512.00567), section 7, smoothing; Zhang et al. 2018 (arXiv
1710.09412), mixup; Polyak & Juditsky 1992, averaging.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from solutions.phase2_advanced.batch_size import scaled_learning_rate
from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .trainer_config import Config


def learning_rate(step: int, config: Config, steps_per_epoch: int) -> float:
    """The rate of optimizer step ``step`` (0 is the first)."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    rate = scaled_learning_rate(
        step,
        base_lr=config.base_lr,
        base_batch=config.base_batch,
        global_batch=config.global_batch,
        warmup_steps=warmup,
    )
    if step < warmup:
        return rate
    done = (step - warmup) / max(1, config.epochs * steps_per_epoch - warmup)
    return rate * (1 + math.cos(math.pi * done)) / 2


def make_optimizer_class(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, float]]:
    """The optimizer's class and its options.

    Weight decay is for all parameters: a flat shard does not tell biases from matrices.
    """
    common = {"lr": config.base_lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW, common
    # momentum correction takes momentum before the choice: not a second time here
    corrected = config.compression == "topk"
    return torch.optim.SGD, {**common, "momentum": 0.0 if corrected else config.momentum}


class Mixup:
    """Mixes the images of a micro-batch with each other; draws from (seed, step, rank, micro)."""

    def __init__(self, alpha: float, seed: int, rank: int) -> None:
        self.alpha, self.seed, self.rank = alpha, seed, rank

    def __call__(
        self, images: Tensor, targets: Tensor, step: int, micro: int
    ) -> tuple[Tensor, Tensor, float]:
        """(mixed images, the partners' targets, share of the own ones); nothing for alpha 0."""
        if not self.alpha:
            return images, targets, 1.0
        rng = np.random.default_rng((self.seed, step, self.rank, micro))
        share = float(rng.beta(self.alpha, self.alpha))
        partner = torch.from_numpy(rng.permutation(len(targets))).to(images.device)
        return images.mul(share).add_(images[partner], alpha=1 - share), targets[partner], share


def summed_loss(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The sum over the targets of their (smoothed) cross-entropy, in float32."""
    return F.cross_entropy(
        logits.float(),
        targets.flatten(),
        reduction="sum",
        label_smoothing=smoothing,
        ignore_index=IGNORED,
    )


class AverageOfWeights:
    """An exponential moving average of parameters (or this rank's shards) and float buffers."""

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self.tensors = [t.detach() for t in tensors if t.is_floating_point()]
        self.average = [t.clone() for t in self.tensors]
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update after optimizer step ``step``; early on it forgets faster, because the first
        weights are bad."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, self.tensors, 1 - decay)

    def restart(self) -> None:
        """Set the average to the present weights."""
        torch._foreach_copy_(self.average, self.tensors)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averages for weights inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, average in zip(self.tensors, self.average, strict=True):
            kept = tensor.clone()
            tensor.copy_(average)
            average.copy_(kept)
