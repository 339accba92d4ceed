# Exercises 4.4: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.4
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""State for another number of ranks: a tensor that was cut into W shards is cut into V.

A run that W ranks saved is resumed by V ranks. Samples and batches are dealt out anew
(``elastic_sampler``). The own state of each rank is translated here:

    state      a tensor of n elements that was cut into W shards is cut into V: the new shard is
               made of those that it overlaps, at most W/V + 2 of them
    random     a rank that existed goes on with its numbers; one that did not begins with numbers
               that nobody has had: seeded by (seed, step, rank)

A shard in a saved tree is ``{"numel": n, "chunk": (k,)}``, without padding (see ``cut``).

Messages: none. Reading: only those of the W saved parts that overlap. Invariant: the loss curve is
that of an uninterrupted run, up to rounding (where no random numbers are drawn per rank).

Sources: Wan et al. 2024 (ByteCheckpoint, arXiv 2407.20143; states that are cut anew when they are
loaded); Or, Zhang & Freedman 2020, "Resource Elasticity in Distributed Deep Learning" (MLSys).
"""

from __future__ import annotations

import functools
import operator
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from given.safe_format import Tree

from .template_fault_tolerance import Saved
from .template_sample_seeds import random_state, set_random_state


def chunk_of(numel: int, world_size: int, rank: int) -> range:
    """The elements of a flat tensor that ``rank`` holds: its shard, of ceil(n / W) elements.

    The last shards may be shorter or empty; there is no padding.
    """
    # Step 1: both borders end at numel
    raise NotImplementedError("exercise 4.4")


def cut(own: Tensor, numel: int, world_size: int, rank: int) -> Tree:
    """The tree that ``rank`` saves for its shard of a flat tensor of ``numel`` elements.

    ``own``: its elements, and padding behind them if there is any. The result is
    ``{"numel": n, "chunk": (k,)}`` with a detached copy of its elements, without padding, in
    ``own``'s dtype.
    """
    # Step 2: with another number of ranks padding would be somewhere else: it is in no file
    # Step 3: copy: a view would be saved, and kept alive, with all of its memory
    raise NotImplementedError("exercise 4.4")


def is_chunk(value: Any) -> bool:
    """Whether ``value`` is a shard as ``cut`` makes it."""
    return isinstance(value, dict) and value.keys() == {"numel", "chunk"}


def recut(saved: Saved, world_size: int, rank: int) -> Tree:
    """The tree that ``rank`` of ``world_size`` would have saved as its own.

    Shards (``is_chunk``) are put together from those that overlap, in new tensors of their dtype.
    Everything else in the tree is equal on all ranks and taken from one of them, with its type.
    ``saved`` stays as it is. Reads the trees of the old ranks whose shards overlap, and one at
    least, each once. Raises ValueError if a shard that it needs has the wrong length.
    """
    # Step 4: the tree of the old rank whose shards begin near ours gives the structure
    # Step 5: walk it; a shard is the overlap of ranges, once per old rank, counted in its shard
    raise NotImplementedError("exercise 4.4")


@dataclass(frozen=True)
class Adapted:
    """A checkpoint as if ``world_size`` ranks had saved it, for ``TrainingState`` to restore."""

    saved: Saved
    world_size: int
    seed: int

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.saved.step

    @property
    def shared(self) -> Tree:
        """The state that all ranks have alike: it does not depend on their number."""
        return self.saved.shared

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata as it was saved."""
        return self.saved.metadata

    def own(self, rank: int) -> Tree:
        """``recut``, and the random streams of ``rank``: its ``"random"`` and generators.

        Generators are the parts that are bare tensors. A rank that the saving run had goes on with
        its own streams. A new rank begins with streams that follow from (seed, step, rank). No two
        streams of a new rank, and no streams of two ranks, steps or seeds are equal. The streams of
        this process stay where they are, and ``saved`` stays as it is.
        """
        # Step 6: a stream is no shard and no common value. Two ranks with the same stream would
        #         train with the same dropout. TrainingState keeps generators as bare tensors
        raise NotImplementedError("exercise 4.4")


def new_streams(seed: int, like: Tree) -> Tree:
    """A ``random_state`` after each library was seeded with a number of its own that follows from
    ``seed``. It has the streams that ``like`` has.

    The streams of this process stay where they are.
    """
    # Step 7: seed, look, and put everything back. torch and numpy have the same kind of generator:
    #         equal seeds would make equal streams
    raise NotImplementedError("exercise 4.4")


def adapt(saved: Saved, world_size: int, seed: int = 0) -> Saved | Adapted:
    """``saved`` for ``world_size`` ranks: ``state.restore(adapt(saved, world_size))``.

    For as many ranks as have saved it, the result is ``saved`` itself: exact to the bit. ``seed``
    is the run's. Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    # Step 8: nothing to do is the common case
    raise NotImplementedError("exercise 4.4")
