"""Micro-batches of samples: which rank trains on which and when, and the processes that load them.

Step k of an epoch takes

    order[k·B : (k+1)·B]        B: the global batch; rank r takes every W-th of them

at every world size W (exercise 4.18), in micro-batches, equally many on every rank.

A sample that can't be read still has its position in the order, so no other rank's samples move.
It is left out of its batch and named once. The mean loss is over the samples that could be read.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from given.parent import end_with_parent
from solutions.phase1_data_parallel.data_loader import ShardedBatchSampler, ShardedSampler
from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .elastic_sampler import ElasticSampler

Sample = tuple[int, int]  # epoch, index; epoch -1: not augmented
Decoded = tuple[Tensor, Tensor, int]  # inputs, targets, index; all targets IGNORED: unreadable
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class DataError(ValueError):
    """An error in the data folder, in one sentence."""


class Batch(NamedTuple):
    """The parts of one micro-batch: at least one row, whose targets may be IGNORED."""

    inputs: Tensor  # (n, …): images of uint8, tokens of int64
    targets: Tensor  # (n,) or (n, tokens) int64
    unreadable: list[int]  # indices that were left out

    def pin_memory(self) -> Batch:
        """The same batch in memory from which a GPU can copy asynchronously."""
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.unreadable)


class Collate:
    """Stacks the samples that could be read; without any, ``blank``, whose targets are IGNORED.

    A batch is never empty, so that the model runs, and communicates, equally often on every rank.
    """

    def __init__(self, blank: tuple[Tensor, Tensor]) -> None:
        self.blank = blank

    def __call__(self, samples: Sequence[Decoded]) -> Batch:
        readable = [bool((targets != IGNORED).any()) for _, targets, _ in samples]
        good = [(inputs, targets) for inputs, targets, _ in compress(samples, readable)]
        bad = [index for (_, _, index), known in zip(samples, readable, strict=True) if not known]
        inputs, targets = zip(*(good or [self.blank]), strict=True)
        return Batch(torch.stack(inputs), torch.stack(targets), bad)


class RunBatches(Sampler[list[Sample]]):
    """This rank's micro-batches from step ``first_step`` to ``steps`` of the whole run.

    One loader serves all epochs: its workers start once and read ahead over the ends of epochs.
    Raises DataError if there are fewer samples than ranks.
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
            raise DataError(
                f"{sampler.dataset_size} samples are too few for {sampler.world_size} ranks: each "
                "needs one"
            )
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
    """This rank's part of every sample once, in order, in equally many batches on every rank."""

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
    """A worker ends with its rank and not before. SIGTERM and SIGUSR1 come to all processes of a
    job, and a rank that saves after them still needs its data."""
    end_with_parent()
    for number in PREEMPTION:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)


def end_decoders() -> None:
    """End the remaining processes of a run's loaders. They ignore the signal that Python sends them
    when it exits, and Python would wait for them for ever."""
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
    blank: tuple[Tensor, Tensor],
    workers: int,
    prefetch: int,
    device: torch.device,
) -> DataLoader[Batch]:
    """A loader whose ``workers`` processes decode ``prefetch`` batches each ahead and stay."""
    return Steady(
        dataset,
        batch_sampler=batches,
        collate_fn=Collate(blank),
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=serve_the_rank,
    )


def name_unreadable(
    dataset: Dataset[Decoded], batches: Iterable[Batch], told: set[str]
) -> Iterator[Batch]:
    """The same batches. Each file that was left out is named once: its path goes to ``told``."""
    for batch in batches:
        for index in batch.unreadable:
            path = str(dataset.files.paths[index])
            if path not in told:
                told.add(path)
                print(f"left out, unreadable: {path}", file=sys.stderr, flush=True)
        yield batch
