"""The image classifiers of the trainer, all with random weights drawn on the CPU from a seed.

torchvision's ResNets and ViT-B/16, and a small CNN without normalisation, whose gradient does not
depend on how a batch is divided over ranks.
"""

from __future__ import annotations

import torch
from torch import nn


class Stages(nn.Sequential):
    """Parts one after the other. torch.compile of torch 2.8 does not compile code of torch's own
    files. Of a plain ``nn.Sequential`` it would compile nothing, without a word."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for part in self:
            value = part(value)
        return value


def small_cnn(classes: int, width: int = 32) -> nn.Module:
    """Two stages of convolutions and two linear layers; 95,000 parameters for ten classes."""
    return Stages(
        nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2 * width * 16, 72), nn.ReLU()
        ),
        nn.Linear(72, classes),
    )


def build_model(name: str, classes: int, image_size: int, seed: int) -> nn.Module:
    """The model ``name`` for ``classes`` classes; the program's own random state is kept.

    Raises RuntimeError with the remedy if torchvision does not fit the installed torch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "small_cnn":
            return small_cnn(classes)
        try:
            from torchvision import models
        except (ImportError, RuntimeError) as error:
            raise RuntimeError(
                f"torchvision does not work here ({error}): install torch and torchvision from the "
                "same index"
            ) from error
        if name == "vit_b_16":
            return models.vit_b_16(weights=None, num_classes=classes, image_size=image_size)
        return models.get_model(name, weights=None, num_classes=classes)
