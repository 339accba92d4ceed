"""Classifying images from a folder: what the trainer does with images alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .batches import Batch, Decoded
from .image_folder import ImageFolder, SyntheticImages, blank, check_classes, scan
from .image_models import build_model
from .recipe import Mixup, summed_loss
from .task import Evaluation, Part, Task
from .trainer_config import Config

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


def normalised(images: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    """uint8 to float32 with mean 0 and deviation 1 (of ImageNet), on ``device``."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.to(device, non_blocking=True).to(torch.float32, memory_format=layout)
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))
    return images.mul_(1 / (255 * std)).sub_(mean / std)


@dataclass(frozen=True, kw_only=True)
class ImageEvaluation(Evaluation):
    """Loss, and the shares of images whose class is the first guess, or among the first five."""

    top1: float
    top5: float
    images: int

    @property
    def score(self) -> float:
        return self.top1

    def __str__(self) -> str:
        return f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%} of {self.images} images"


class ImageTask(Task):
    """``config.model`` on the images of ``config.data``; ``rank`` is for the numbers of mixup."""

    unit = "images"

    def __init__(self, config: Config, rank: int = 0) -> None:
        super().__init__(config)
        self.train_set, self.val_set = open_images(config)
        self.classes = self.train_set.files.classes
        self.mixup = Mixup(config.mixup, config.seed, rank)

    @property
    def described(self) -> str:
        count, classes = len(self.train_set), len(self.classes)
        return f"{count:,} images of {classes} classes in {self.config.data}"

    def build_model(self) -> nn.Module:
        config = self.config
        return build_model(config.model, len(self.classes), config.image_size, config.seed)

    def blank(self) -> tuple[Tensor, Tensor]:
        return blank(self.config.image_size), torch.tensor(IGNORED)

    def example(self, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = self.config.image_size
        images = torch.zeros(samples, 3, size, size, dtype=torch.uint8)
        targets = torch.zeros(samples, dtype=torch.int64, device=device)
        return normalised(images, device, self.config.channels_last), targets

    def part(self, batch: Batch, device: torch.device) -> Part:
        plain = super().part(batch, device)
        images = normalised(plain.inputs, device, self.config.channels_last)
        return plain._replace(inputs=images)

    def training_part(self, batch: Batch, device: torch.device, step: int, micro: int) -> Part:
        images, targets, whole = self.part(batch, device)
        images, partners, share = self.mixup(images, targets, step, micro)
        if share == 1.0:
            return Part(images, targets, whole)
        smoothing = self.config.label_smoothing

        def loss(logits: Tensor) -> Tensor:
            others = summed_loss(logits, partners, smoothing)
            return share * whole(logits) + (1 - share) * others

        return Part(images, targets, loss)

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy, right at the first guess, among five, number of images."""
        counts = targets != IGNORED
        logits, targets = logits[counts].double(), targets[counts]
        guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right = guesses == targets[:, None]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return torch.stack([loss, right[:, 0].sum(), right.sum(), counts.sum()])

    def evaluation(self, sums: Sequence[float]) -> ImageEvaluation:
        loss, top1, top5, count = sums
        return ImageEvaluation(
            val_loss=loss / count, top1=top1 / count, top5=top5 / count, images=int(count)
        )


def open_images(config: Config) -> tuple[ImageFolder | SyntheticImages, Dataset[Decoded] | None]:
    """The images to train on, and those to evaluate on (None for noise)."""
    if config.data == "synthetic":
        return SyntheticImages(config.image_size), None
    files, tests = scan(config.data, "train"), scan(config.data, "val")
    check_classes(tests.classes, files.classes, f"{config.data}/val")
    kind: dict[str, Any] = {"augment": config.augment, "seed": config.seed}
    return (
        ImageFolder(files, config.image_size, **kind),
        ImageFolder(tests, config.image_size, **kind),
    )
