"""Split a data set over the ranks, so that together they see every sample exactly once per epoch.

Data parallelism rests on one invariant: with per-rank batch size b on W ranks, step k of an epoch
must consume exactly the samples that one process would consume with batch size B = W·b:

    union over ranks of batch(rank, k)  =  order[k·B : (k+1)·B]

Then the average of the ranks' gradients is the gradient of the global batch (exercise 1.4), and
training on W ranks equals training on one. The shuffled order is dealt out like cards: rank r takes
order[r::W]. That keeps the invariant without communication, because all ranks draw the same
permutation from (seed, epoch).

Sizes: N samples on W ranks give ceil(N/W) per rank with padding, floor(N/W) with dropping.
Messages: none. Source: Goyal et al. 2017 (arXiv 1706.02677), section 3, Remark 4 (one shuffle).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

Remainder = Literal["pad", "drop", "keep"]


class ShardedSampler(Sampler[int]):
    """The indices that one rank trains on, in order.

    The order of an epoch is ``torch.randperm(dataset_size, generator=g)`` with ``g`` seeded by
    ``seed + epoch`` (without ``shuffle``: 0, 1, 2 …), the same on all ranks. Rank r takes every
    world_size-th entry, beginning with the r-th. ``remainder`` chooses the treatment of entries
    that don't fill a whole round of all ranks:

    - ``"pad"``: the order goes on from its own beginning (as often as needed) until every rank has
      ceil(N/W) entries. The repeated entries come last on their rank. ``num_real`` is the number of
      entries of this rank that are not repeated.
    - ``"drop"``: the last N mod W entries of the order are left out.
    - ``"keep"``: the shards are uneven: the first N mod W ranks have one entry more.

    ``len(sampler)`` is the number of entries of this rank. Nothing is communicated, and the global
    random state is neither used nor changed. Raises ValueError for a rank outside
    0 … world_size-1, a world size or data set size below 1, or an unknown ``remainder``.
    """

    def __init__(
        self,
        dataset_size: int,
        *,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "pad",
    ) -> None:
        if dataset_size < 1 or world_size < 1:
            raise ValueError(f"sizes must be positive: data {dataset_size}, world {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        if remainder not in ("pad", "drop", "keep"):
            raise ValueError(f"remainder must be pad, drop or keep, not {remainder!r}")
        self.dataset_size = dataset_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.remainder = remainder
        self.epoch = 0
        self.skip = 0  # entries of this rank that the next pass leaves out

    @property
    def num_real(self) -> int:
        """Entries of this rank in a whole epoch that are not padding, whatever was consumed."""
        # --- exercise 1.1: start
        # Step 1: count the positions rank, rank + W, rank + 2W … below the data set's size
        # Step 2: dropping leaves whole rounds only
        if self.remainder == "drop":
            return self.dataset_size // self.world_size
        return len(range(self.rank, self.dataset_size, self.world_size))
        # --- exercise 1.1: end

    def __len__(self) -> int:
        """Entries of this rank in a whole epoch, padding included, whatever was consumed."""
        # --- exercise 1.1: start
        # Step 3: only padding adds to the real ones: every rank gets the rounded-up share
        if self.remainder == "pad":
            return -(-self.dataset_size // self.world_size)
        return self.num_real
        # --- exercise 1.1: end

    def __iter__(self) -> Iterator[int]:
        """This rank's indices of the current epoch, from the resumed position if there is one.

        The indices are ints. A pass may begin with ``iter`` or with its first index. A pass that
        has begun goes on as it began, whatever is called meanwhile.
        """
        # --- exercise 1.1: start
        # Step 4: draw the epoch's order from seed + epoch, alike on all ranks
        # Step 5: entry i of this rank is position rank + i·W of the order; padding wraps around
        # Step 6: leave out the entries that were consumed before the interruption, this once
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=generator)
        else:
            order = torch.arange(self.dataset_size)
        positions = self.rank + self.world_size * torch.arange(len(self))
        mine = order[positions % self.dataset_size].tolist()
        start, self.skip = self.skip, 0
        return iter(mine[start:])
        # --- exercise 1.1: end

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next passes take (at first 0).

        A resumed position is forgotten when the epoch is another one, and kept when it is the same.
        """
        # --- exercise 1.1: start
        # Step 7: a new epoch begins at its first entry; naming the resumed epoch again keeps
        #         the position
        if epoch != self.epoch:
            self.skip = 0
        self.epoch = epoch
        # --- exercise 1.1: end

    def state_dict(self, consumed: int) -> dict[str, int]:
        """The position to resume from, as plain numbers.

        ``consumed``: how many entries of this rank and epoch were trained on, from the epoch's
        beginning, also in a resumed pass. Only the caller knows: a loader with workers reads ahead,
        so the sampler has handed out more entries than were used. The sampler stays as it is.
        """
        # --- exercise 1.1: start
        # Step 8: the epoch, the seed that made its order, and the number of consumed entries
        return {"epoch": self.epoch, "seed": self.seed, "consumed": consumed}
        # --- exercise 1.1: end

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken: the next pass (only) leaves out the consumed entries.

        The next pass is the one that begins next, even if it is left early. The state's epoch and
        seed replace those of this sampler. Data set, rank and world size must be those of the
        sampler that made it. The state may have been JSON, and stays as it is.
        """
        # --- exercise 1.1: start
        # Step 9: the opposite of state_dict
        self.epoch = state["epoch"]
        self.seed = state["seed"]
        self.skip = state["consumed"]
        # --- exercise 1.1: end


def split_batch(global_batch_size: int, world_size: int) -> int:
    """The batch size of one rank, from the global one. Both have names of their own, so that no
    reader has to guess which one a number means.

    Raises ValueError if the global batch can't be split evenly or is empty, or if there is no rank.
    """
    # --- exercise 1.2: start
    # Step 1: refuse a batch that does not divide: silent rounding would change the training
    if min(global_batch_size, world_size) < 1 or global_batch_size % world_size:
        raise ValueError(f"a batch of {global_batch_size} does not divide over {world_size} ranks")
    return global_batch_size // world_size
    # --- exercise 1.2: end


class ShardedBatchSampler(Sampler[list[int]]):
    """This rank's batches, equally many on every rank.

    There is one batch per slice of ``batch_size · world_size`` entries of the whole order (with its
    padding, without dropped entries). The last slice may be partial. A rank whose shard ends
    earlier than another's yields a shorter or empty batch. So all ranks take the same number of
    steps, and none waits for ever. After ``load_state_dict``, too, every rank has equally many
    batches left, if all ranks consumed the same number of full batches.
    """

    def __init__(self, sampler: ShardedSampler, batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Batches of a whole epoch, whatever was consumed."""
        # --- exercise 1.2: start
        # Step 2: the rank with the most entries decides; with "keep" that is rank 0
        s = self.sampler
        longest = -(-s.dataset_size // s.world_size) if s.remainder == "keep" else len(s)
        return -(-longest // self.batch_size)
        # --- exercise 1.2: end

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of at most ``batch_size`` indices, possibly empty at the end.

        An iterator that is never read uses up no resumed position: a loader with workers makes one.
        """
        # --- exercise 1.2: start
        # Step 3: a resumed epoch has fewer batches left; divide this rank's entries into batches,
        #         and go on, with empty ones, to the number that all ranks agree on
        begun = self.sampler.skip // self.batch_size
        mine = list(self.sampler)
        for start in range(0, (len(self) - begun) * self.batch_size, self.batch_size):
            yield mine[start : start + self.batch_size]
        # --- exercise 1.2: end

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler."""
        self.sampler.set_epoch(epoch)


def seed_everything(seed: int, rank: int, worker: int = 0) -> None:
    """Seed torch, numpy and random, each so that every (seed, rank, worker) draws other numbers.

    The same three numbers (none negative, some large) give the same draws in every process and run.
    """
    # --- exercise 1.2: start
    # Step 4: mix the three numbers so that no two combinations meet. With seed + rank, seed 1 on
    #         rank 0 meets seed 0 on rank 1. Then seed all three libraries
    mixed = np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]
    torch.manual_seed(int(mixed))
    np.random.seed(int(mixed))
    random.seed(int(mixed))
    # --- exercise 1.2: end


class _SeedWorker:
    """Seeds a loader's worker process; a class, so that it can be sent to a spawned worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, worker: int) -> None:
        # --- exercise 1.2: start
        # Step 5: torch.initial_seed() in a worker is base_seed + worker, drawn anew each epoch
        base_seed = torch.initial_seed() - worker
        seed_everything(base_seed, self.rank, worker)
        # --- exercise 1.2: end


class _Collate:
    """Stacks samples to a batch; an empty batch has length 0 and the shapes of a real one."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, samples: Sequence[Any]) -> Any:
        # --- exercise 1.2: start
        # Step 6: without samples, make a batch of one and shorten it to length zero
        if samples:
            return default_collate(samples)
        return [field[:0] for field in default_collate([self.dataset[0]])]
        # --- exercise 1.2: end


def build_loader(
    dataset: Dataset[Any],
    *,
    rank: int,
    world_size: int,
    global_batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    remainder: Remainder = "pad",
    num_workers: int = 0,
    prefetch: int = 2,
    device: torch.device | str = "cpu",
) -> DataLoader[Any]:
    """The loader of one rank; ``dataset[i]`` is a tuple of tensors or numbers.

    ``loader.batch_sampler`` is a ``ShardedBatchSampler`` over a ``ShardedSampler``. Call its
    ``set_epoch`` before each epoch. An empty batch has the fields of a real one, with their dtypes
    and shapes but length 0. Worker processes draw different random numbers by torch, numpy and
    random, on each rank others. The numbers change from pass to pass and repeat with the seed.
    Loading leaves the global random state of the caller alone (but ``dataset[i]`` itself may draw
    there). ``prefetch`` batches per worker are loaded ahead. Memory is pinned only for a CUDA
    ``device``. Raises ValueError where ``split_batch`` or ``ShardedSampler`` does.
    """
    # --- exercise 1.2: start
    # Step 7: sampler -> batches -> loader; a generator of its own gives the workers' base seeds.
    #         Its seed is equal on all ranks: the rank comes in by Step 5
    # Step 8: prefetch_factor is allowed with workers only
    sampler = ShardedSampler(
        len(dataset),
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
    )
    return DataLoader(
        dataset,
        batch_sampler=ShardedBatchSampler(sampler, split_batch(global_batch_size, world_size)),
        collate_fn=_Collate(dataset),
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=torch.device(device).type == "cuda" and torch.cuda.is_available(),
        worker_init_fn=_SeedWorker(rank),
        generator=torch.Generator().manual_seed(seed),
    )
    # --- exercise 1.2: end
