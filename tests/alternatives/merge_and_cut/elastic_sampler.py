# Batches cut into blocks; for: 4.18

from __future__ import annotations

import torch
from torch.utils.data import Sampler


class ElasticSampler(Sampler):
    """Blocks of each batch; the ranks with one sample more are the last ones."""

    def __init__(
        self, dataset_size, *, global_batch_size, rank, world_size, shuffle=True, seed=0
    ) -> None:
        for name, value in (("data set", dataset_size), ("batch", global_batch_size)):
            if value < 1:
                raise ValueError(f"the {name} has {value} samples")
        if world_size < 1 or rank not in range(world_size):
            raise ValueError(f"no rank {rank} among {world_size}")
        self.total, self.batch_size, self.shuffle = dataset_size, global_batch_size, shuffle
        self.place = rank, world_size
        self.at = {"seed": seed, "epoch": 0, "from": 0}

    @property
    def sampler(self):
        return self

    def __len__(self):
        return sum(1 for _ in range(0, self.total, self.batch_size))

    def size_of(self, batch):
        return len(range(self.total)[batch * self.batch_size : (batch + 1) * self.batch_size])

    def __iter__(self):
        rank, world_size = self.place
        order = torch.arange(self.total)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.at["seed"] + self.at["epoch"])
            order = torch.randperm(self.total, generator=generator)
        rest = order[self.at["from"] :]
        self.at["from"] = 0
        parts = [
            batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size].tolist()
            for batch in rest.split(self.batch_size)
            if len(batch)
        ]
        return iter(parts)

    def set_epoch(self, epoch):
        if epoch != self.at["epoch"]:
            self.at |= {"epoch": epoch, "from": 0}

    def state_dict(self, consumed):
        return self.at | {"from": consumed, "of": self.total, "batch": self.batch_size}

    def load_state_dict(self, state):
        if (state["of"], state["batch"]) != (self.total, self.batch_size):
            raise ValueError(
                f"{state['of']} samples in batches of {state['batch']} were saved, here are "
                f"{self.total} in batches of {self.batch_size}"
            )
        self.at = {name: state[name] for name in self.at}


def loss_weight(num_samples, batch_size, world_size):
    return num_samples / (batch_size / world_size)
