"""PyTorch's scenarios of elastic training: data for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.data import CyclingIterator, ElasticDistributedSampler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distlab.ranks import RankContext
from solutions.phase1_data_parallel.data_loader import ShardedSampler
from solutions.phase4_production.elastic_sampler import ElasticSampler
from solutions.phase4_production.resume import Position, batches
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


@SCENARIOS.ported
def test_shards_of_a_data_set_with_padding(ctx: RankContext) -> Pair:
    """Every size against every number of ranks, shuffled, padded or shortened as torch does it."""
    found: list[list[Any]] = [[], []]
    for size in (1, 5, 8, 17):
        for world in (1, 2, 3, 7):
            for drop in (False, True):
                if drop and size < world:
                    continue  # torch's ranks would have nothing
                remainder = "drop" if drop else "pad"
                place = {"rank": ctx.rank % world, "world_size": world}
                ours = ShardedSampler(size, seed=3, remainder=remainder, **place)
                theirs = DistributedSampler(
                    range(size), world, ctx.rank % world, seed=3, drop_last=drop
                )
                for epoch in (0, 2):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    if size % world == 0 or not drop:
                        found[0].append(list(ours))
                        found[1].append(list(theirs))
                    else:
                        found[0].append(len(ours))
                        found[1].append(len(theirs))
    return found[0], found[1]


@SCENARIOS.ported
def test_going_on_in_the_middle_with_other_ranks(ctx: RankContext) -> Pair:
    """One rank has taken 8 of 24 samples; two go on: the same samples are left on both sides."""
    first = ElasticSampler(24, global_batch_size=4, rank=0, world_size=1, shuffle=False)
    place = {"rank": ctx.rank, "world_size": 2}
    ours = ElasticSampler(24, global_batch_size=4, shuffle=False, **place)
    ours.load_state_dict(first.state_dict(8))
    mine = sorted(i for batch in ours for i in batch)
    theirs = ElasticDistributedSampler(range(24), num_replicas=2, rank=ctx.rank, start_index=8)
    found: list[Any] = [mine, sorted(theirs)]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    return tuple(sorted(gathered[0][side] + gathered[1][side]) for side in (0, 1))


@SCENARIOS.ported
def test_epochs_in_one_stream(ctx: RankContext) -> Pair:
    """Three epochs one after the other, and from the second one on."""
    data = TensorDataset(torch.arange(6))
    found: list[list[Any]] = [[], []]
    for start in (0, 1):
        sampler = ElasticSampler(6, global_batch_size=2, rank=0, world_size=1, shuffle=False)
        loader = DataLoader(data, batch_sampler=sampler)
        stream = batches(loader, Position(step=0, epoch=start, batch=0), 3)
        found[0].append([x for (part,) in stream for x in part.tolist()])
        found[1].append(list(CyclingIterator(3, lambda epoch: iter(range(6)), start)))
    return found[0], found[1]
