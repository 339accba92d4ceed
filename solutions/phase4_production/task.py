"""What a run trains on: data, model, loss and evaluation. The training loop knows no more of them.

``image_task`` classifies images, ``text_task`` predicts the next byte of a text. A further task is
a subclass, and a line in ``trainer_setup.open_task``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .batches import Batch, Decoded
from .recipe import summed_loss
from .trainer_config import Config


class Part(NamedTuple):
    """One micro-batch on its device; ``loss(logits)`` is the sum over its targets."""

    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Evaluation(ABC):
    """Over all readable samples, each counted once; the same on every rank."""

    val_loss: float

    @property
    @abstractmethod
    def score(self) -> float:
        """Higher is better: it decides which checkpoints stay."""


class Task(ABC):
    """The data of a configuration, opened, and what depends on their kind."""

    unit: str  # of which a batch has so many
    targets_per_sample = 1
    counts_tokens = False  # whether a target is a token
    classes: tuple[str, ...] = ()  # a checkpoint must have the same
    train_set: Dataset[Decoded]
    val_set: Dataset[Decoded] | None  # None for noise

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    @abstractmethod
    def described(self) -> str:
        """The training data in a few words."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with random weights of the configuration's seed, on the CPU."""

    @abstractmethod
    def blank(self) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a sample that trains nothing: all targets are IGNORED."""

    @abstractmethod
    def example(self, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch of the right shapes, whatever is in it."""

    def part(self, batch: Batch, device: torch.device) -> Part:
        """The micro-batch as the model takes it."""
        targets = batch.targets.to(device, non_blocking=True)
        smoothing = self.config.label_smoothing
        inputs = batch.inputs.to(device, non_blocking=True)
        return Part(inputs, targets, lambda logits: summed_loss(logits, targets, smoothing))

    def training_part(self, batch: Batch, device: torch.device, step: int, micro: int) -> Part:
        """As ``part``, with what the recipe changes in micro-batch ``micro`` of ``step``."""
        return self.part(batch, device)

    @abstractmethod
    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(n,) float64: what an evaluation adds up; the last one is the number of targets."""

    @abstractmethod
    def evaluation(self, sums: Sequence[float]) -> Evaluation:
        """The evaluation from the sums over all batches of all ranks."""
