# for: 4.18
"""Written differently: each batch is cut into runs, and all parts are made at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class ElasticSampler(Sampler[list[int]]):
    def __init__(
        self,
        dataset_size: int,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if min(dataset_size, global_batch_size, world_size) < 1:
            raise ValueError(f"sizes: {dataset_size}, {global_batch_size}, {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.dataset_size = dataset_size
        self.batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.skip = 0

    @property
    def sampler(self) -> ElasticSampler:
        return self

    def __len__(self) -> int:
        whole, rest = divmod(self.dataset_size, self.batch_size)
        return whole + bool(rest)

    def size_of(self, batch: int) -> int:
        end = min((batch + 1) * self.batch_size, self.dataset_size)
        return end - batch * self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.dataset_size))
        if self.shuffle:
            own = torch.Generator()
            own.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=own).tolist()
        first = -(-self.skip // self.batch_size)
        self.skip = 0
        parts = []
        for batch in range(first, len(self)):
            size, start = (self.size_of(batch), batch * self.batch_size)
            low = start + self.rank * size // self.world_size
            high = start + (self.rank + 1) * size // self.world_size
            parts.append(order[low:high])
        return iter(parts)

    def set_epoch(self, epoch: int) -> None:
        if self.epoch == epoch:
            return
        self.epoch, self.skip = (epoch, 0)

    def state_dict(self, consumed: int) -> dict[str, int]:
        state = {"epoch": self.epoch, "seed": self.seed, "consumed": int(consumed)}
        state["global_batch_size"] = self.batch_size
        state["samples"] = self.dataset_size
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["samples"] != self.dataset_size:
            raise ValueError(
                f"counted in a data set of {state['samples']}, not {self.dataset_size}"
            )
        if state["global_batch_size"] != self.batch_size:
            raise ValueError(
                f"the global batch was {state['global_batch_size']}, is {self.batch_size}"
            )
        self.seed, self.epoch, self.skip = (state[key] for key in ("seed", "epoch", "consumed"))


def loss_weight(num_samples: int, batch_size: int, world_size: int) -> float:
    return num_samples / batch_size * world_size if num_samples else 0.0
