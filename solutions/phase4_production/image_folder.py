"""Images from a folder: which there are, how they are decoded, who trains on which and when.

A sample is named by (epoch, index), and everything random about it is drawn from (seed, epoch,
index). So it is the same whichever rank and worker decodes it, in a run that was interrupted and
at another world size, without any state of workers in a checkpoint. Step k of an epoch takes

    order[k·B : (k+1)·B]        B: the global batch; rank r takes every W-th of them

at every world size W (exercise 4.4), in micro-batches, equally many on every rank.

A file that can't be decoded still has its place in the order, so nobody else's samples move; it is
left out of its batch, named once, and the mean loss is over those that could be read.
"""

from __future__ import annotations

import multiprocessing
import signal
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from given.parent import end_with_parent
from solutions.phase1_data_parallel.data_loader import ShardedBatchSampler, ShardedSampler
from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .elastic import ElasticSampler

Sample = tuple[int, int]  # epoch, index; epoch -1: not augmented
Decoded = tuple[Tensor, int, int]  # image (3, size, size) uint8, label, index; IGNORED: unreadable
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


class DataError(ValueError):
    """What is wrong with the data folder, in one sentence."""


class Batch(NamedTuple):
    """What one micro-batch consists of; at least one row, whose target may be IGNORED."""

    images: Tensor  # (n, 3, size, size) uint8
    targets: Tensor  # (n,) int64
    unreadable: list[int]  # indices that were left out

    def pin_memory(self) -> Batch:
        """The same, where a GPU can copy from it asynchronously."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.unreadable)


@dataclass(frozen=True)
class Files:
    """The images of one split; ``labels[i]`` is the place of their folder in ``classes``."""

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
        """(image, label, index); label IGNORED and a blank image if the file can't be decoded."""
        from PIL import Image

        epoch, index = sample
        try:
            with Image.open(self.files.paths[index]) as opened:
                picture = opened.convert("RGB")
        except (*UNREADABLE, Image.DecompressionBombError):
            return blank(self.size), IGNORED, index
        image = self._train(picture, epoch, index) if epoch >= 0 else self._whole(picture)
        return image, self.files.labels[index], index

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
        return self.images[sample[1] % 256], sample[1] % self.classes, sample[1]


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


def normalised(images: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    """uint8 to float32 with mean 0 and deviation 1 (of ImageNet), on ``device``."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = images.to(device, non_blocking=True).to(torch.float32, memory_format=layout)
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))
    return images.mul_(1 / (255 * std)).sub_(mean / std)


class Collate:
    """Stacks what could be read; without any, one blank row stands there with target IGNORED.

    A batch is never empty, so that the model runs, and communicates, equally often on every rank.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, samples: Sequence[Decoded]) -> Batch:
        good = [(image, label) for image, label, _ in samples if label != IGNORED]
        bad = [index for _, label, index in samples if label == IGNORED]
        images, labels = zip(*(good or [(blank(self.size), IGNORED)]), strict=True)
        return Batch(torch.stack(images), torch.tensor(labels), bad)


class RunBatches(Sampler[list[Sample]]):
    """This rank's micro-batches from step ``first_step`` to ``steps`` of the whole run.

    One loader serves all epochs: its workers start once and read ahead over the ends of epochs.
    Raises DataError if there are fewer images than ranks.
    """

    def __init__(
        self,
        sampler: ElasticSampler,
        micro_batch: int,
        *,
        first_step: int,
        steps: int,
    ) -> None:
        if sampler.dataset_size < sampler.world_size:
            raise DataError(f"{sampler.dataset_size} images for {sampler.world_size} ranks")
        self.sampler, self.micro_batch = sampler, micro_batch
        self.first_step, self.steps = first_step, steps

    def count(self, step: int) -> int:
        """Micro-batches of a step, the same number on every rank."""
        samples = self.sampler.size_of(step % len(self.sampler))
        return -(-samples // (self.sampler.world_size * self.micro_batch))

    def __len__(self) -> int:
        return sum(map(self.count, range(self.first_step, self.steps)))

    def __iter__(self) -> Iterator[list[Sample]]:
        step = self.first_step
        while step < self.steps:
            epoch, begun = divmod(step, len(self.sampler))
            self.sampler.set_epoch(epoch)
            self.sampler.skip = begun * self.sampler.batch_size
            for part in islice(self.sampler, self.steps - step):
                for first in range(0, self.count(step) * self.micro_batch, self.micro_batch):
                    yield [(epoch, index) for index in part[first : first + self.micro_batch]]
                step += 1


class EvaluationBatches(Sampler[list[Sample]]):
    """This rank's part of every image once, in order, in equally many batches on every rank."""

    def __init__(self, size: int, batch: int, *, rank: int, world_size: int) -> None:
        sampler = ShardedSampler(
            size, rank=rank, world_size=world_size, shuffle=False, remainder="keep"
        )
        self.batches = ShardedBatchSampler(sampler, batch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Sample]]:
        return ([(-1, index) for index in indices] for indices in self.batches)


def serve_the_rank(worker: int) -> None:
    """A worker ends with its rank and not before: a rank that saves after SIGTERM or SIGUSR1,
    which come to all processes of a job, still needs its data."""
    end_with_parent()
    for number in PREEMPTION:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)


def end_decoders() -> None:
    """End what a run has left of its loaders' processes: they ignore the signal by which Python
    ends them when it exits itself, and it would wait for them for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would call it a failure
    for process in multiprocessing.active_children():
        process.kill()


class Steady(DataLoader[Batch]):
    """A loader whose processes don't hear of a preemption, not even while they are started."""

    def __iter__(self) -> Iterator[Batch]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_loader(
    dataset: Dataset[Decoded],
    batches: Sampler[list[Sample]],
    *,
    size: int,
    workers: int,
    prefetch: int,
    device: torch.device,
) -> DataLoader[Batch]:
    """A loader whose ``workers`` processes decode ``prefetch`` batches each ahead and stay."""
    return Steady(
        dataset,
        batch_sampler=batches,
        collate_fn=Collate(size),
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=serve_the_rank,
    )
