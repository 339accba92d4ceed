# alternative for: 1.1, 1.2
"""Passes are generators with numbers of their own; seeds by SHA-256 of a text; workers persist."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from solutions.phase1_data_parallel.data_loader import *
from solutions.phase1_data_parallel.data_loader import ShardedBatchSampler as BatchBase
from solutions.phase1_data_parallel.data_loader import ShardedSampler as Base


class ShardedSampler(Base):
    """iter() fixes epoch and seed; the position goes to the pass that is first read."""

    @property
    def num_real(self):
        whole, rest = divmod(self.dataset_size, self.world_size)
        return whole + (self.remainder != "drop" and self.rank < rest)

    def __len__(self):
        whole, rest = divmod(self.dataset_size, self.world_size)
        return whole + 1 if self.remainder == "pad" and rest else self.num_real

    def __iter__(self):
        return self._pass(self.seed + self.epoch, len(self), getattr(self, "_resumed", [0]))

    def _pass(self, seed, count, resumed):
        skip, resumed[0] = resumed[0], 0
        if getattr(self, "_resumed", None) is resumed:
            self.skip = 0
        order = list(range(self.dataset_size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(seed)
            order = torch.randperm(self.dataset_size, generator=generator).tolist()
        for entry in range(skip, count):
            yield order[(self.rank + entry * self.world_size) % self.dataset_size]

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.skip, self._resumed = epoch, 0, [0]

    def state_dict(self, consumed):
        return {"position": consumed, "random_seed": self.seed, "pass": self.epoch}

    def load_state_dict(self, state):
        self.skip, self.seed, self.epoch = (state[k] for k in ("position", "random_seed", "pass"))
        self._resumed = [self.skip]


def split_batch(global_batch_size, world_size):
    if world_size <= 0 or global_batch_size <= 0:
        raise ValueError("a global batch needs at least one sample and one rank")
    share, rest = divmod(global_batch_size, world_size)
    if rest:
        raise ValueError(f"{rest} samples of the global batch would be left over")
    return share


class ShardedBatchSampler(BatchBase):
    def __len__(self):
        s = self.sampler
        first = Base(s.dataset_size, rank=0, world_size=s.world_size, remainder=s.remainder)
        return (len(first) + self.batch_size - 1) // self.batch_size

    def __iter__(self):
        done = (self.sampler.skip + self.batch_size - 1) // self.batch_size
        entries = list(self.sampler)
        starts = range(0, len(entries), self.batch_size)
        batches = [entries[at : at + self.batch_size] for at in starts]
        yield from batches + [[] for _ in range(len(self) - done - len(batches))]


def number_of(*numbers):
    """256 bits that these numbers alone give."""
    text = ",".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "little")


def seed_everything(seed, rank, worker=0):
    torch.manual_seed(number_of(seed, rank, worker, 0) >> 193)
    large = number_of(seed, rank, worker, 1)
    np.random.seed([large >> 32 * i & 0xFFFFFFFF for i in range(8)])
    random.seed(number_of(seed, rank, worker, 2))


class Stacked:
    """Keeps an empty batch, made when it is first needed, without touching the random state."""

    def __init__(self, dataset):
        self.dataset, self.empty = dataset, None

    def __call__(self, samples):
        if samples:
            return default_collate(samples)
        if self.empty is None:
            states = torch.get_rng_state(), np.random.get_state(), random.getstate()
            fields = default_collate([self.dataset[0]])
            self.empty = [field.narrow(0, 0, 0).clone() for field in fields]
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        return [field.clone() for field in self.empty]


def build_loader(
    dataset,
    *,
    rank,
    world_size,
    global_batch_size,
    shuffle=True,
    seed=0,
    remainder="pad",
    num_workers=0,
    prefetch=2,
    device="cpu",
):
    def start(worker):
        seed_everything(torch.initial_seed() - worker, rank, worker)

    sampler = ShardedSampler(
        len(dataset),
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
    )
    options = {}
    if num_workers:
        options = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch,
            "persistent_workers": True,
            "worker_init_fn": start,
        }
    return DataLoader(
        dataset,
        batch_sampler=ShardedBatchSampler(sampler, split_batch(global_batch_size, world_size)),
        collate_fn=Stacked(dataset),
        generator=torch.Generator().manual_seed(number_of(seed, rank) >> 193),
        pin_memory=str(device).startswith("cuda"),
        **options,
    )
