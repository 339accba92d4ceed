# Exercises 4.4: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.4
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""State for another number of ranks: what was cut into W shards is cut into V.

A run that was saved by W ranks is resumed by V. Samples and batches are dealt out anew
(``elastic_sampler``); what each rank has saved as its own is translated here:

    state      a tensor of n elements that was cut into W shards is cut into V: the new shard is
               made of those that it overlaps, at most W/V + 2 of them
    random     a rank that existed goes on with its numbers; one that did not begins with numbers
               that nobody has had: seeded by (seed, step, rank)

A shard in a saved tree is ``{"numel": n, "chunk": (k,)}``, without padding; see ``cut``.

Messages: none. Reading: of the W saved parts only those that overlap. Invariant: the loss curve is
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
    """What ``rank`` saves of its shard of a flat tensor of ``numel`` elements.

    ``own``: its elements, and padding behind them if there is any. ``{"numel": n, "chunk": (k,)}``
    with a detached copy of its elements, without padding, in ``own``'s dtype.
    """
    # Step 2: padding would be somewhere else for another number of ranks: it is in no file
    # Step 3: a copy: a view would be saved, and kept alive, with all of its memory
    raise NotImplementedError("exercise 4.4")


def is_chunk(value: Any) -> bool:
    """Whether ``value`` is what ``cut`` makes of a shard."""
    return isinstance(value, dict) and value.keys() == {"numel", "chunk"}


def recut(saved: Saved, world_size: int, rank: int) -> Tree:
    """The tree that ``rank`` of ``world_size`` would have saved as its own.

    Shards (``is_chunk``) are put together from those that overlap, in new tensors of their dtype;
    everything else in the tree is equal on all ranks and taken from one of them, with its type.
    What was saved stays as it is. Reads the trees of the old ranks whose shards overlap, and one at
    least, each once. Raises ValueError if a shard that it needs doesn't have the length that it
    should.
    """
    # Step 4: the tree of the old rank whose shards begin near ours gives the structure
    # Step 5: walk it; a shard is the overlap of ranges, once per old rank, counted in its shard
    raise NotImplementedError("exercise 4.4")


@dataclass(frozen=True)
class Adapted:
    """A checkpoint as if ``world_size`` ranks had saved it: what ``TrainingState`` restores."""

    saved: Saved
    world_size: int
    seed: int

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.saved.step

    @property
    def shared(self) -> Tree:
        """What all ranks have alike: it does not depend on their number."""
        return self.saved.shared

    @property
    def metadata(self) -> dict[str, Any]:
        """As it was saved."""
        return self.saved.metadata

    def own(self, rank: int) -> Tree:
        """``recut``, and the random streams of ``rank``: its ``"random"`` and generators.

        Generators are the parts that are bare tensors. A rank that the saving run had goes on with
        its own; another begins with streams that follow from (seed, step, rank). No two streams of
        a new rank, and no streams of two ranks, steps or seeds are equal. The streams of this
        process stay where they are, and so does what was saved.
        """
        # Step 6: a stream is no shard and no common value: two ranks with the same one would
        #          train with the same dropout. TrainingState keeps generators as bare tensors
        raise NotImplementedError("exercise 4.4")


def new_streams(seed: int, like: Tree) -> Tree:
    """What ``random_state`` gives after each library was seeded with a number that follows from
    ``seed``, another one for each; for the streams that ``like`` has.

    The streams of this process stay where they are.
    """
    # Step 7: seed, look, and put everything back; torch and numpy have the same kind of generator,
    #         which the same number would make the same stream
    raise NotImplementedError("exercise 4.4")


def adapt(saved: Saved, world_size: int, seed: int = 0) -> Saved | Adapted:
    """``saved`` for ``world_size`` ranks: ``state.restore(adapt(saved, world_size))``.

    With as many ranks as have saved it, it is ``saved`` itself: exact to the bit. ``seed`` is the
    run's. Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    # Step 8: nothing to do is the common case
    raise NotImplementedError("exercise 4.4")
