"""Going on with another number of ranks: samples, batches and state are dealt out anew.

A run that was saved by W ranks is resumed by V: a node is gone, or there are more of them again.
Nothing that training means may depend on the number of ranks, only who does what:

    samples    a position counts samples of the epoch's order, consumed by all ranks together;
               what is left is order[position:], whoever takes it. Each is seen exactly once
    batch      step k takes order[position : position + B] for the same B: V ranks have B/V samples
               each, or one more (B need not be divisible). So the learning rate stays as well
    state      a tensor of n elements that was cut into W chunks is cut into V: the new chunk is
               made of those that it overlaps, at most W/V + 2 of them
    random     a rank that existed goes on with its numbers; one that did not begins with numbers
               that nobody has had: seeded by (seed, step, rank)

With n_r of the batch's B samples on rank r, the gradient of the mean loss over the batch is

    g  =  Σ_r n_r·g_r / B  =  mean over the ranks of  (n_r·V/B)·g_r

so a rank's mean loss times n_r·V/B is right for any data parallelism that averages over ranks.

A chunk in a saved tree is ``{"numel": n, "chunk": (k,)}``, without padding; see ``cut``.

Messages: none. Reading: of the W saved parts only those that overlap. Invariant: the loss curve is
that of an uninterrupted run, up to rounding (where no random numbers are drawn per rank).

Sources: Goyal et al. 2017 (arXiv 1706.02677), section 2.1 (batch and learning rate belong
together); Wan et al. 2024 (ByteCheckpoint, arXiv 2407.20143; states that are cut anew when they are
loaded); Or, Zhang & Freedman 2020, "Resource Elasticity in Distributed Deep Learning" (MLSys).
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from .fault_tolerance import Saved, Tree
from .sample_seeds import random_state, set_random_state


class ElasticSampler(Sampler[list[int]]):
    """This rank's batches of indices; with those of the other ranks they are the global batches.

    The order of an epoch is ``torch.randperm(dataset_size, generator=g)`` with ``g`` seeded by
    ``seed + epoch`` (without ``shuffle``: 0, 1, 2 …). Global batch k is the k-th run of
    ``global_batch_size`` entries of it (the last may be shorter); every rank has a part of each,
    whose sizes differ by one at most, so a part may be empty. All of this is alike for every world
    size, but for who takes which sample of a batch.

    A ``batch_sampler`` for loaders, and a ``sampler`` for ``TrainingState``: its ``batch_size`` is
    the global one, because its positions count samples of all ranks. Raises ValueError for a rank
    outside 0 … world_size-1 and for sizes below 1.
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
        """What keeps the position: itself."""
        return self

    def __len__(self) -> int:
        """Batches of a whole epoch, the same number on every rank and world size."""
        # --- exercise 4.4: start
        # Step 1: round up: the last batch may be shorter
        return -(-self.dataset_size // self.batch_size)
        # --- exercise 4.4: end

    def size_of(self, batch: int) -> int:
        """Samples in global batch ``batch`` of an epoch, of all ranks together."""
        # --- exercise 4.4: start
        # Step 2: a whole batch, or what is left
        return min(self.batch_size, self.dataset_size - batch * self.batch_size)
        # --- exercise 4.4: end

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each batch from the resumed position, empty lists among them."""
        # --- exercise 4.4: start
        # Step 3: the epoch's order knows no ranks; go on behind what all have consumed, this once
        # Step 4: cut batches first and deal each of them out: a batch that does not divide by the
        #         number of ranks loses no sample, and no rank has a step less than another
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=generator).tolist()
        else:
            order = list(range(self.dataset_size))
        begin, self.skip = self.skip, 0
        for start in range(begin, self.dataset_size, self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch[self.rank :: self.world_size]
        # --- exercise 4.4: end

    def set_epoch(self, epoch: int) -> None:
        """Choose the next pass's epoch; naming the current one again keeps a resumed position."""
        # --- exercise 4.4: start
        # Step 5: a resumed run names its epoch before it goes on
        if epoch != self.epoch:
            self.skip = 0
        self.epoch = epoch
        # --- exercise 4.4: end

    def state_dict(self, consumed: int) -> dict[str, int]:
        """The position, the same on every rank; it says nothing of the number of ranks.

        ``consumed``: samples of this epoch that all ranks together have trained on. The caller says
        so, because loaders with workers read ahead.
        """
        # --- exercise 4.4: start
        # Step 6: where we are, and what order and batch that was counted in
        names = ("epoch", "seed", "dataset_size", "batch_size")
        return {name: getattr(self, name) for name in names} | {"consumed": consumed}
        # --- exercise 4.4: end

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a position that any number of ranks has saved.

        Raises ValueError with both numbers, and changes nothing, if the data set or the global
        batch had another size: the position would mean other samples, the learning rate another
        batch.
        """
        # --- exercise 4.4: start
        # Step 7: refuse before anything changes
        for name in ("dataset_size", "batch_size"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"saved with a {name} of {state[name]}, resumed with {getattr(self, name)}"
                )
        self.epoch, self.seed, self.skip = state["epoch"], state["seed"], state["consumed"]
        # --- exercise 4.4: end


def loss_weight(num_samples: int, batch_size: int, world_size: int) -> float:
    """What to multiply a rank's mean loss by, so that the mean over ranks of the gradients is the
    gradient of the mean over the global batch.

    ``num_samples``: this rank's part (0 gives 0), ``batch_size``: of all ranks together.
    """
    # --- exercise 4.4: start
    # Step 8: n_r·V/B; with equal parts it is 1
    return num_samples * world_size / batch_size
    # --- exercise 4.4: end


def chunk_of(numel: int, world_size: int, rank: int) -> range:
    """The elements of a flat tensor that ``rank`` holds: chunk ``rank`` of ceil(n / W) elements.

    The last chunks may be shorter or empty; there is no padding.
    """
    # --- exercise 4.4: start
    # Step 9: both borders end at numel
    chunk = -(-numel // world_size)
    return range(min(rank * chunk, numel), min((rank + 1) * chunk, numel))
    # --- exercise 4.4: end


def cut(own: Tensor, numel: int, world_size: int, rank: int) -> Tree:
    """What ``rank`` saves of its chunk of a flat tensor of ``numel`` elements.

    ``own``: its elements, and padding behind them if there is any. ``{"numel": n, "chunk": (k,)}``.
    """
    # --- exercise 4.4: start
    # Step 10: padding would be somewhere else for another number of ranks: it is in no file
    # Step 11: a copy: a view would be saved, and kept alive, with all of its memory
    return {"numel": numel, "chunk": own[: len(chunk_of(numel, world_size, rank))].clone()}
    # --- exercise 4.4: end


def is_chunk(value: Any) -> bool:
    """Whether ``value`` is a place of a tree where ``cut`` has put a chunk."""
    return isinstance(value, dict) and value.keys() == {"numel", "chunk"}


def recut(saved: Saved, world_size: int, rank: int) -> Tree:
    """The tree that ``rank`` of ``world_size`` would have saved as its own.

    Chunks are put together from those that overlap; everything else in the tree is equal on all
    ranks and taken from one of them. Reads the trees of the old ranks that it needs, each once.
    Raises ValueError if the chunks of a tensor don't have the lengths that they should.
    """
    # --- exercise 4.4: start
    # Step 12: the tree of the old rank whose chunks begin near ours gives the structure
    # Step 13: walk it; a chunk is the overlap of ranges, once per old rank, counted in its chunk
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
                chunk = functools.reduce(operator.getitem, path, read(other))["chunk"]
                if len(chunk) != len(theirs):
                    raise ValueError(
                        f"rank {other} of {saved.world_size} should have {len(theirs)} of "
                        f"{numel} elements of {'/'.join(map(str, path))}, it has {len(chunk)}"
                    )
                parts.append(chunk[low - theirs.start : high - theirs.start])
        return torch.cat(parts)

    return walk(read(rank * saved.world_size // world_size), ())
    # --- exercise 4.4: end


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

        A rank that the saving run had goes on with its own; another begins with streams that are
        seeded by (seed, step, rank).
        """
        # --- exercise 4.4: start
        # Step 14: a stream is no chunk and no common value: two ranks with the same one would
        #          train with the same dropout. TrainingState keeps generators as bare tensors
        tree = recut(self.saved, self.world_size, rank)
        generators = [name for name, part in tree["parts"].items() if isinstance(part, Tensor)]
        if rank < self.saved.world_size:
            mine = self.saved.own(rank)
            streams, states = mine["random"], {name: mine["parts"][name] for name in generators}
        else:
            numbers = np.random.SeedSequence([self.seed, self.step, rank]).generate_state(2)
            streams = new_streams(int(numbers[0]), tree["random"])
            state = torch.Generator().manual_seed(int(numbers[1])).get_state()
            states = dict.fromkeys(generators, state)
        return tree | {"random": streams, "parts": tree["parts"] | states}
        # --- exercise 4.4: end


def new_streams(seed: int, like: Tree) -> Tree:
    """What ``random_state`` gives after seeding with ``seed``, for the streams that ``like`` has.

    The streams of this process stay where they are.
    """
    # --- exercise 4.4: start
    # Step 15: seed, look, and put everything back
    before = random_state()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    streams = random_state()
    set_random_state(before)
    if "cuda" in like and torch.cuda.is_available():
        streams["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return streams
    # --- exercise 4.4: end


def adapt(saved: Saved, world_size: int, seed: int = 0) -> Saved | Adapted:
    """``saved`` for ``world_size`` ranks: ``state.restore(adapt(saved, world_size))``.

    With as many ranks as have saved it, it is ``saved`` itself: exact to the bit. ``seed`` is the
    run's. Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    # --- exercise 4.4: start
    # Step 16: nothing to do is the common case
    return saved if saved.world_size == world_size else Adapted(saved, world_size, seed)
    # --- exercise 4.4: end
