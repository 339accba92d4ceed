# alternative for: 1.1, 1.2
"""Lists instead of tensors, one pass over the whole order, batches kept by slicing it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate

from solutions.phase1_data_parallel.data_loader import *
from solutions.phase1_data_parallel.data_loader import ShardedSampler as Base


class ShardedSampler(Base):
    """Pads or cuts the order as a list first, then strides through it."""

    def _order(self) -> list[int]:
        order = list(range(self.dataset_size))
        if self.shuffle:
            g = torch.Generator()
            g.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=g).tolist()
        whole = len(order) // self.world_size * self.world_size
        if self.remainder == "drop":
            return order[:whole]
        if self.remainder == "pad":
            total = math.ceil(len(order) / self.world_size) * self.world_size
            return list(itertools.islice(itertools.cycle(order), total))
        return order

    @property
    def num_real(self):
        if self.remainder == "drop":
            return len(self)
        extra = self.rank < self.dataset_size % self.world_size
        return self.dataset_size // self.world_size + extra

    def __len__(self):
        return len(self._order()[self.rank :: self.world_size])

    def __iter__(self):
        mine = itertools.islice(self._order()[self.rank :: self.world_size], self.skip, None)
        self.skip = 0
        yield from mine

    def set_epoch(self, epoch):
        if epoch == self.epoch:
            return
        self.epoch, self.skip = epoch, 0

    def state_dict(self, consumed):
        return {"where": consumed, "epoch": self.epoch, "from": self.seed}

    def load_state_dict(self, state):
        self.skip, self.epoch, self.seed = state["where"], state["epoch"], state["from"]


def split_batch(global_batch_size, world_size):
    each, rest = divmod(global_batch_size, max(world_size, 1))
    if rest or each < 1 or world_size < 1:
        raise ValueError(f"can't split {global_batch_size} into {world_size} equal parts")
    return each


class Batches(BatchSampler):
    """torch's own batches of this rank's indices, topped up with empty ones."""

    def __init__(self, sampler, batch_size):
        super().__init__(sampler, batch_size, drop_last=False)

    def __len__(self):
        s = self.sampler
        entries = [
            len(Base(s.dataset_size, rank=r, world_size=s.world_size, remainder=s.remainder))
            for r in range(s.world_size)
        ]
        return math.ceil(max(entries) / self.batch_size)

    def __iter__(self):
        left = len(self) - self.sampler.skip // self.batch_size
        for batch in super().__iter__():
            left -= 1
            yield batch
        yield from ([] for _ in range(left))

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)


def seed_everything(seed, rank, worker=0):
    number = hash((seed, rank, worker, "distributed".__len__())) % 2**32
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


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
    def collate(samples):
        if not samples:
            return [field[:0] for field in collate([dataset[0]])]
        fields = zip(*samples, strict=True)
        return [default_collate(list(field)) for field in fields]

    def start(worker):
        info = torch.utils.data.get_worker_info()
        seed_everything(info.seed - worker, rank, worker)

    sampler = ShardedSampler(
        len(dataset),
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
    )
    options = {"prefetch_factor": prefetch} if num_workers else {}
    return DataLoader(
        dataset,
        batch_sampler=Batches(sampler, split_batch(global_batch_size, world_size)),
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=start,
        pin_memory=str(device).startswith("cuda") and torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed + 17),
        **options,
    )
