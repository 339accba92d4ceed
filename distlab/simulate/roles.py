"""The ranks of a plan that do the same: one of each role runs, and stands for all of its role.

Ranks lie in a grid of P stages, D copies and T positions: rank = (p·D + d)·T + t, as in
``parallel_gpt.py``. With hybrid sharding t is the position in a group of shards, and d the group.
Any other data parallelism has one stage and one position. Two copies are alike if they do the same
in every stage and position, and two positions are alike if they do in every stage and copy. A role
is (stage, kind of copy, kind of position). So a rank that runs finds in each of its groups, and in
its pipeline, ranks that run for all others.

"The same" is all that decides when a rank computes and communicates:

- its share of the work: the elements of its shards, its words, whether it is first;
- how many nodes its groups have, and which of its messages leave the node;
- its position among the ranks with which it shares a network card or an uplink, and their roles:
  they take turns there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..hardware.clusters import Cluster, load_cluster
from .models import blocks_of, model_spec
from .plan import Plan


@dataclass(frozen=True)
class Grid:
    """The ranks as ``stages`` x ``copies`` x ``positions``."""

    stages: int
    copies: int
    positions: int

    def __len__(self) -> int:
        return self.stages * self.copies * self.positions

    def at(self, stage: int, copy: int, position: int) -> int:
        """The rank at this point."""
        return (stage * self.copies + copy) * self.positions + position

    def points(self) -> Iterator[tuple[int, int, int]]:
        """Stage, copy and position of each rank."""
        for rank in range(len(self)):
            rest, position = divmod(rank, self.positions)
            yield *divmod(rest, self.copies), position

    def groups(self) -> Iterator[range]:
        """The ranks that differ in their position only, in their copy only, in their stage only."""
        width = self.copies * self.positions
        for begin in range(0, len(self), self.positions):
            yield range(begin, begin + self.positions)
        for begin in range(0, len(self), width):
            for position in range(self.positions):
                yield range(begin + position, begin + width, self.positions)
        for begin in range(width):
            yield range(begin, len(self), width)


def roles(plan: Plan, gpus: int) -> tuple[int, ...]:
    """For each rank the one that runs for it; empty if every rank runs.

    Costs O(``gpus``) and one model without data.
    """
    if plan.every_rank or not plan.folds:
        return ()
    cluster = load_cluster(plan.cluster)
    if plan.model_ranks > 1:
        grid = Grid(plan.pipeline, gpus // plan.model_ranks, plan.tensor)
        shares: list[Hashable] = _words(plan)
        keys: list[Hashable] = [(t == 0, shares[t]) for _, _, t in grid.points()]
    else:
        inside = plan.shards or min(cluster.gpus_per_node, gpus)
        node = inside if plan.strategy == "hybrid" else 1
        if gpus % node:
            return ()  # the strategy says that this is impossible
        grid = Grid(1, gpus // node, node)
        shares = _shards(plan, node if node > 1 else gpus)
        keys = [(rank == 0, shares[rank % len(shares)]) for rank in range(gpus)]
    if len(grid) == grid.copies:  # one group, in which all ranks wait for each other
        return tuple(_roles(grid, keys))
    keys = [*zip(keys, *_crossings(grid, cluster), strict=True)]
    return tuple(_apart(grid, cluster, _roles(grid, keys)))


def _roles(grid: Grid, keys: Iterable[Hashable]) -> list[int]:
    """The first rank of each rank's role, where ranks with different keys differ."""
    key = _numbered(keys)
    stages, copies, width = (range(n) for n in (grid.stages, grid.copies, grid.positions))
    copy_of = _firsts(tuple(key[grid.at(p, d, t)] for p in stages for t in width) for d in copies)
    like = _firsts(tuple(key[grid.at(p, d, t)] for p in stages for d in copies) for t in width)
    return [grid.at(p, copy_of[d], like[t]) for p, d, t in grid.points()]


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """A small number for each key: keys may be long."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _firsts(keys: Iterable[Hashable]) -> list[int]:
    """For each key the first position that has it."""
    first: dict[Hashable, int] = {}
    return [first.setdefault(key, position) for position, key in enumerate(keys)]


def _crossings(grid: Grid, cluster: Cluster) -> Iterator[list[Any]]:
    """For each rank the nodes of its groups, of both ends of its pipeline, and whether the next
    stage is on its node."""
    nodes: list[list[int]] = [[] for _ in range(len(grid))]
    for group in grid.groups():
        count = len({cluster.node(rank) for rank in group})
        for rank in group:
            nodes[rank].append(count)
    yield [tuple(counts) for counts in nodes]
    for distance in (grid.copies * grid.positions, len(grid) - grid.copies * grid.positions):
        others = [(rank + distance) % len(grid) for rank in range(len(grid))]
        yield [cluster.node(rank) == cluster.node(other) for rank, other in enumerate(others)]


def _apart(grid: Grid, cluster: Cluster, found: list[int]) -> list[int]:
    """Other roles for ranks that take turns on a card or, with messages, on a node's uplink."""
    by_node = grid.stages > 1 and (cluster.oversubscription > 1 or cluster.processors > 0)
    sharing: dict[Any, list[int]] = {}
    for rank in range(len(grid)):
        shared = cluster.node(rank) if by_node else cluster.nic(rank)
        sharing.setdefault(shared, []).append(rank)
    if len(sharing) == len(grid):
        return found
    while True:
        keys: list[Hashable] = [()] * len(grid)
        for ranks in sharing.values():
            together = tuple(found[rank] for rank in ranks)
            for turn, rank in enumerate(ranks):
                keys[rank] = found[rank], turn, together
        finer = _roles(grid, keys)
        if finer == found:
            return found
        found = finer


def _words(plan: Plan) -> list[Hashable]:
    """How many words each position of a tensor group has (``vocabulary_range``)."""
    with torch.device("meta"):
        model: Any = model_spec(plan.model, layers=1).build()
    words, positions = len(model.tokens.weight), plan.tensor
    return [words * (t + 1) // positions - words * t // positions for t in range(positions)]


def _shards(plan: Plan, ranks: int) -> list[Hashable]:
    """The pieces of parameters that each of ``ranks`` owns, in each vector of another kind."""
    owned: list[list[Any]] = [[] for _ in range(ranks)]
    for sizes in dict.fromkeys(_vectors(plan)):
        shard, begin = -(-sum(sizes) // ranks), 0
        pieces: list[list[int]] = [[] for _ in range(ranks)]
        for size in sizes:
            end = begin + size
            for rank in range(begin // shard, -(-end // shard)):
                pieces[rank].append(min(end, (rank + 1) * shard) - max(begin, rank * shard))
            begin = end
        for mine, own in zip(owned, pieces, strict=True):
            mine.append(tuple(own))
    return [tuple(mine) for mine in owned]


def _vectors(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The vectors that are cut into one shard for each rank, as elements of their parts: FSDP's
    units, or the parameters in ZeRO's buckets, the last parameter first."""
    if plan.strategy not in ("fsdp", "hybrid", "zero1", "zero2"):
        return
    with torch.device("meta"):
        model = plan.spec.build()
    sizes = [p.numel() for p in model.parameters()]
    if plan.strategy in ("fsdp", "hybrid"):
        units = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
        yield from ((n,) for n in (*units, sum(sizes) - sum(units)) if n)
        return
    most = int(plan.bucket_mb * 2**20) // plan.weights.itemsize
    bucket: list[int] = []
    for size in reversed(sizes):
        if bucket and sum(bucket) + size > most:
            yield tuple(bucket)
            bucket = []
        bucket.append(size)
    yield tuple(bucket)
