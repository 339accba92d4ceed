# Exercises 1.1, 1.2: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase1.py 1.1
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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
        # Step 1: count the positions rank, rank + W, rank + 2W … below the data set's size
        # Step 2: dropping leaves whole rounds only
        raise NotImplementedError("exercise 1.1")

    def __len__(self) -> int:
        """Entries of this rank in a whole epoch, padding included, whatever was consumed."""
        # Step 3: only padding adds to the real ones: every rank gets the rounded-up share
        raise NotImplementedError("exercise 1.1")

    def __iter__(self) -> Iterator[int]:
        """This rank's indices of the current epoch, from the resumed position if there is one.

        The indices are ints. A pass may begin with ``iter`` or with its first index. A pass that
        has begun goes on as it began, whatever is called meanwhile.
        """
        # Step 4: draw the epoch's order from seed + epoch, alike on all ranks
        # Step 5: entry i of this rank is position rank + i·W of the order; padding wraps around
        # Step 6: leave out the entries that were consumed before the interruption, this once
        raise NotImplementedError("exercise 1.1")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next passes take (at first 0).

        A resumed position is forgotten when the epoch is another one, and kept when it is the same.
        """
        # Step 7: a new epoch begins at its first entry; naming the resumed epoch again keeps
        #         the position
        raise NotImplementedError("exercise 1.1")

    def state_dict(self, consumed: int) -> dict[str, int]:
        """The position to resume from, as plain numbers.

        ``consumed``: how many entries of this rank and epoch were trained on, from the epoch's
        beginning, also in a resumed pass. Only the caller knows: a loader with workers reads ahead,
        so the sampler has handed out more entries than were used. The sampler stays as it is.
        """
        # Step 8: the epoch, the seed that made its order, and the number of consumed entries
        raise NotImplementedError("exercise 1.1")

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where ``state`` was taken: the next pass (only) leaves out the consumed entries.

        The next pass is the one that begins next, even if it is left early. The state's epoch and
        seed replace those of this sampler. Data set, rank and world size must be those of the
        sampler that made it. The state may have been JSON, and stays as it is.
        """
        # Step 9: the opposite of state_dict
        raise NotImplementedError("exercise 1.1")


def split_batch(global_batch_size: int, world_size: int) -> int:
    """The batch size of one rank, from the global one. Both have names of their own, so that no
    reader has to guess which one a number means.

    Raises ValueError if the global batch can't be split evenly or is empty, or if there is no rank.
    """
    # Step 1: refuse a batch that does not divide: silent rounding would change the training
    raise NotImplementedError("exercise 1.2")


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
        # Step 2: the rank with the most entries decides; with "keep" that is rank 0
        raise NotImplementedError("exercise 1.2")

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of at most ``batch_size`` indices, possibly empty at the end.

        An iterator that is never read uses up no resumed position: a loader with workers makes one.
        """
        # Step 3: a resumed epoch has fewer batches left; divide this rank's entries into batches,
        #         and go on, with empty ones, to the number that all ranks agree on
        raise NotImplementedError("exercise 1.2")

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler."""
        self.sampler.set_epoch(epoch)


def seed_everything(seed: int, rank: int, worker: int = 0) -> None:
    """Seed torch, numpy and random, each so that every (seed, rank, worker) draws other numbers.

    The same three numbers (none negative, some large) give the same draws in every process and run.
    """
    # Step 4: mix the three numbers so that no two combinations meet. With seed + rank, seed 1 on
    #         rank 0 meets seed 0 on rank 1. Then seed all three libraries
    raise NotImplementedError("exercise 1.2")


class _SeedWorker:
    """Seeds a loader's worker process; a class, so that it can be sent to a spawned worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, worker: int) -> None:
        # Step 5: torch.initial_seed() in a worker is base_seed + worker, drawn anew each epoch
        raise NotImplementedError("exercise 1.2")


class _Collate:
    """Stacks samples to a batch; an empty batch has length 0 and the shapes of a real one."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, samples: Sequence[Any]) -> Any:
        # Step 6: without samples, make a batch of one and shorten it to length zero
        raise NotImplementedError("exercise 1.2")


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
    # Step 7: sampler -> batches -> loader; a generator of its own gives the workers' base seeds.
    #         Its seed is equal on all ranks: the rank comes in by Step 5
    # Step 8: prefetch_factor is allowed with workers only
    raise NotImplementedError("exercise 1.2")
