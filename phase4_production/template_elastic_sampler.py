# Exercises 4.18: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.18
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Samples and batches for another number of ranks: they are dealt out anew, and nothing else moves.

A run that W ranks saved is resumed by V ranks: a node is gone, or there are more of them again. The
meaning of training may not depend on the number of ranks. Only the division of work may:

    samples    a position counts samples of the epoch's order, consumed by all ranks together;
               what is left is order[position:], whoever takes it. Each is seen exactly once
    batch      step k takes order[position : position + B] for the same B: V ranks have B/V samples
               each, or one more (B need not be divisible). So the learning rate stays as well

With n_r of the batch's B samples on rank r, the gradient of the mean loss over the batch is

    g  =  Σ_r n_r·g_r / B  =  mean over the ranks of  (n_r·V/B)·g_r

so a rank's mean loss times n_r·V/B is right for any data parallelism that averages over ranks.

Messages: none. Invariant: batch k of an epoch holds the same samples for every number of ranks.

Source: Goyal et al. 2017 (arXiv 1706.02677), section 2.1 (batch and learning rate belong together).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class ElasticSampler(Sampler[list[int]]):
    """This rank's batches of indices; with those of the other ranks they are the global batches.

    The order of an epoch is ``torch.randperm(dataset_size, generator=g)`` with ``g`` seeded by
    ``seed + epoch`` (without ``shuffle``: 0, 1, 2 …). Global batch k is the k-th run of
    ``global_batch_size`` entries of it (the last may be shorter). Every rank has a part of each
    batch. The parts' sizes differ by one at most, so a part may be empty. All of this is alike for
    every world size. Only which rank takes which sample of a batch is free.

    It is a ``batch_sampler`` for loaders, and a ``sampler`` for ``TrainingState``. Its
    ``batch_size`` is the global one, because its positions count samples of all ranks. Raises
    ValueError for a rank outside 0 … world_size-1 and for sizes below 1.
    """

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
            raise ValueError(
                f"sizes must be positive: data set {dataset_size}, global batch "
                f"{global_batch_size}, world size {world_size}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.dataset_size = dataset_size
        self.batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.skip = 0  # entries of all ranks that the next pass leaves out

    @property
    def sampler(self) -> ElasticSampler:
        """The object that keeps the position: itself."""
        return self

    def __len__(self) -> int:
        """Batches of a whole epoch, the same number on every rank and world size."""
        # Step 1: round up: the last batch may be shorter
        raise NotImplementedError("exercise 4.18")

    def size_of(self, batch: int) -> int:
        """Samples in global batch ``batch`` (0 … len - 1) of an epoch, of all ranks together."""
        # Step 2: a whole batch, or the rest
        raise NotImplementedError("exercise 4.18")

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each batch from the resumed position: lists of ints, also empty ones.

        A resumed position holds for the pass that begins first, even if that pass is left early.
        The global random streams are neither read nor moved.
        """
        # Step 3: the epoch's order knows no ranks; go on behind the consumed samples, this once
        # Step 4: form batches first and deal each of them out. So a batch that does not divide by
        #         the number of ranks loses no sample, and no rank has a step less than another
        raise NotImplementedError("exercise 4.18")

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass's epoch; naming the current one again keeps a resumed position.

        Another epoch begins with its first sample.
        """
        # Step 5: a resumed run names its epoch before it goes on
        raise NotImplementedError("exercise 4.18")

    def state_dict(self, consumed: int) -> dict[str, int]:
        """The position as numbers: epoch, seed, ``consumed``, and the sizes that these belong to.

        It is the same on every rank and for every number of ranks. ``consumed``: how many samples
        of this epoch all ranks together have trained on, as whole batches. So it is above the data
        set's size after a last batch that is shorter. The caller says so, because loaders with
        workers read ahead.
        """
        # Step 6: the position, and the order and the batch in which it was counted
        raise NotImplementedError("exercise 4.18")

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position that any number of ranks has saved, in its epoch, with its seed.

        Raises ValueError, and changes nothing, if the data set or the global batch had another
        size. The position would mean other samples, and the learning rate another batch.
        """
        # Step 7: refuse before anything changes
        raise NotImplementedError("exercise 4.18")


def loss_weight(num_samples: int, batch_size: int, world_size: int) -> float:
    """The factor for a rank's mean loss that makes the mean over ranks of the gradients the
    gradient of the mean over the global batch.

    ``num_samples``: this rank's part (0 gives 0), ``batch_size``: of all ranks together.
    """
    # Step 8: n_r·V/B; with equal parts it is 1
    raise NotImplementedError("exercise 4.18")
