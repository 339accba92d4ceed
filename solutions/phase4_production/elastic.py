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

from .fault_tolerance import Saved
from .sample_seeds import random_state, set_random_state


def chunk_of(numel: int, world_size: int, rank: int) -> range:
    """The elements of a flat tensor that ``rank`` holds: its shard, of ceil(n / W) elements.

    The last shards may be shorter or empty; there is no padding.
    """
    # --- exercise 4.4: start
    # Step 1: both borders end at numel
    shard = -(-numel // world_size)
    return range(min(rank * shard, numel), min((rank + 1) * shard, numel))
    # --- exercise 4.4: end


def cut(own: Tensor, numel: int, world_size: int, rank: int) -> Tree:
    """The tree that ``rank`` saves for its shard of a flat tensor of ``numel`` elements.

    ``own``: its elements, and padding behind them if there is any. The result is
    ``{"numel": n, "chunk": (k,)}`` with a detached copy of its elements, without padding, in
    ``own``'s dtype.
    """
    # --- exercise 4.4: start
    # Step 2: with another number of ranks padding would be somewhere else: it is in no file
    # Step 3: copy: a view would be saved, and kept alive, with all of its memory
    mine = own.detach()[: len(chunk_of(numel, world_size, rank))]
    return {"numel": numel, "chunk": mine.clone()}
    # --- exercise 4.4: end


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
    # --- exercise 4.4: start
    # Step 4: the tree of the old rank whose shards begin near ours gives the structure
    # Step 5: walk it; a shard is the overlap of ranges, once per old rank, counted in its shard
    read = functools.cache(saved.own)

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        if is_chunk(value):
            return {"numel": value["numel"], "chunk": assemble(value, path)}
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(item, (*path, i)) for i, item in enumerate(value))
        return value

    def assemble(value: Tree, path: tuple[Any, ...]) -> Tensor:
        numel = value["numel"]
        mine = chunk_of(numel, world_size, rank)
        parts = [value["chunk"][:0]]
        for other in range(saved.world_size):
            theirs = chunk_of(numel, saved.world_size, other)
            low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if low < high:
                shard = functools.reduce(operator.getitem, path, read(other))["chunk"]
                if len(shard) != len(theirs):
                    raise ValueError(
                        f"rank {other} of {saved.world_size} should have {len(theirs)} of "
                        f"{numel} elements of {'/'.join(map(str, path))}, it has {len(shard)}"
                    )
                parts.append(shard[low - theirs.start : high - theirs.start])
        return torch.cat(parts)

    return walk(read(rank * saved.world_size // world_size), ())
    # --- exercise 4.4: end


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
        # --- exercise 4.4: start
        # Step 6: a stream is no shard and no common value. Two ranks with the same stream would
        #         train with the same dropout. TrainingState keeps generators as bare tensors
        tree = recut(self.saved, self.world_size, rank)
        generators = [name for name, part in tree["parts"].items() if isinstance(part, Tensor)]
        if rank < self.saved.world_size:
            mine = self.saved.own(rank)
            streams, states = mine["random"], {name: mine["parts"][name] for name in generators}
        else:
            key = np.random.SeedSequence([self.seed, self.step, rank])
            first, *others = (int(n) for n in key.generate_state(1 + len(generators)))
            streams = new_streams(first, tree["random"])
            states = {
                name: torch.Generator().manual_seed(number).get_state()
                for name, number in zip(generators, others, strict=True)
            }
        return tree | {"random": streams, "parts": tree["parts"] | states}
        # --- exercise 4.4: end


def new_streams(seed: int, like: Tree) -> Tree:
    """A ``random_state`` after each library was seeded with a number of its own that follows from
    ``seed``. It has the streams that ``like`` has.

    The streams of this process stay where they are.
    """
    # --- exercise 4.4: start
    # Step 7: seed, look, and put everything back. torch and numpy have the same kind of generator:
    #         equal seeds would make equal streams
    before = random_state()
    for_torch, for_numpy, for_random = map(int, np.random.SeedSequence(seed).generate_state(3))
    torch.default_generator.manual_seed(for_torch)
    np.random.seed(for_numpy)
    random.seed(for_random)
    streams = random_state()
    set_random_state(before)
    if "cuda" in like and torch.cuda.is_available():
        streams["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return streams
    # --- exercise 4.4: end


def adapt(saved: Saved, world_size: int, seed: int = 0) -> Saved | Adapted:
    """``saved`` for ``world_size`` ranks: ``state.restore(adapt(saved, world_size))``.

    For as many ranks as have saved it, the result is ``saved`` itself: exact to the bit. ``seed``
    is the run's. Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    # --- exercise 4.4: start
    # Step 8: nothing to do is the common case
    return saved if saved.world_size == world_size else Adapted(saved, world_size, seed)
    # --- exercise 4.4: end
