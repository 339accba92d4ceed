"""Images from a folder: their list, and how they are decoded and augmented.

A sample is named by (epoch, index), and its random numbers are drawn from (seed, epoch, index). So
it is the same on every rank and worker, after an interruption, and at another world size. No state
of workers is in a checkpoint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .batches import DataError, Decoded, Sample

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)


@dataclass(frozen=True)
class Files:
    """The images of one split; ``labels[i]`` is the index of their folder in ``classes``."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def scan(folder: str | Path, split: str) -> Files:
    """All images of ``folder/split/CLASS/``, sorted, so that every rank numbers them alike.

    Raises DataError if the folder, its classes or images are missing.
    """
    root = Path(folder) / split
    if not root.is_dir():
        raise DataError(f"there is no data folder {root}: CLASS/IMAGE.png go in there")
    classes = tuple(sorted(each.name for each in root.iterdir() if each.is_dir()))
    if not classes:
        raise DataError(f"{root} has no folders: expected one per class, with its images inside")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise DataError(f"{root} has {len(classes)} classes, but no images ({', '.join(SUFFIXES)})")
    paths, labels = zip(*found, strict=True)
    return Files(classes, paths, labels)


def check_classes(have: Sequence[str], want: Sequence[str], where: str) -> None:
    """DataError that names the classes in which two lists differ."""
    missing, extra = sorted(set(want) - set(have)), sorted(set(have) - set(want))
    if missing or extra:
        parts = [f"{word} {', '.join(n[:5])}" for word, n in (("lacks", missing), ("has", extra))]
        told = " and ".join(p for p, n in zip(parts, (missing, extra), strict=True) if n)
        raise DataError(f"{where} {told}: {len(have)} classes instead of {len(want)}")


class ImageFolder(Dataset[Decoded]):
    """Decoded images of one size; ``dataset[epoch, index]``."""

    def __init__(self, files: Files, size: int, *, augment: str = "none", seed: int = 0) -> None:
        self.files, self.size, self.augment, self.seed = files, size, augment, seed

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, sample: Sample) -> Decoded:
        """(image (3, size, size) uint8, label (), index); blank and IGNORED if it is unreadable."""
        from PIL import Image

        epoch, index = sample
        try:
            with Image.open(self.files.paths[index]) as opened:
                picture = opened.convert("RGB")
        except (*UNREADABLE, Image.DecompressionBombError):
            return blank(self.size), torch.tensor(IGNORED), index
        image = self._train(picture, epoch, index) if epoch >= 0 else self._whole(picture)
        return image, torch.tensor(self.files.labels[index]), index

    def _train(self, picture: Any, epoch: int, index: int) -> Tensor:
        """Augmented by numbers that only (seed, epoch, index) decide."""
        if self.augment == "none":
            return self._whole(picture)
        rng = np.random.default_rng((self.seed, epoch, index))
        if self.augment == "crop_flip":
            box = random_box(rng, *picture.size)
            image = to_tensor(picture.resize((self.size, self.size), 2, box=box))
            return image.flip(2) if rng.random() < 0.5 else image
        reach = max(1, self.size // 8)
        down, right = rng.integers(-reach, reach + 1, 2).tolist()
        padded = F.pad(self._whole(picture), (reach, reach, reach, reach))
        return padded[:, reach + down :, reach + right :][:, : self.size, : self.size].contiguous()

    def _whole(self, picture: Any) -> Tensor:
        """The middle square; of photographs 7/8 of it, as 224 pixels of 256 are usual."""
        side = min(picture.size) * (0.875 if self.augment == "crop_flip" else 1.0)
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        box = left, top, left + side, top + side
        if picture.size == (self.size, self.size) and side == self.size:
            return to_tensor(picture)
        return to_tensor(picture.resize((self.size, self.size), 2, box=box))  # 2: bilinear


class SyntheticImages(Dataset[Decoded]):
    """Noise in the shape of ImageNet, to measure a trainer without its data."""

    def __init__(self, size: int, classes: int = 1000, length: int = 1 << 20) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = 256, 3, size, size
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.classes, self.length = classes, length
        names = tuple(f"{k:04}" for k in range(classes))
        self.files = Files(names, (), ())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, sample: Sample) -> Decoded:
        """One of 256 images, and a label."""
        index = sample[1]
        return self.images[index % 256], torch.tensor(index % self.classes), index


def blank(size: int) -> Tensor:
    """(3, size, size) uint8 black."""
    return torch.zeros(3, size, size, dtype=torch.uint8)


def to_tensor(picture: Any) -> Tensor:
    """(3, height, width) uint8 of an RGB picture."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def random_box(rng: np.random.Generator, width: int, height: int) -> tuple[float, ...]:
    """A box of 8 … 100 % of the area, 3:4 … 4:3 (Szegedy et al. 2015, arXiv 1409.4842, 6)."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
