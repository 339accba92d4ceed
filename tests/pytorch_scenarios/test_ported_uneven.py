"""PyTorch's scenarios of ranks that run out of batches: exercise 3.31 beside torch's Join."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext
from solutions.phase3_multi_node.uneven_inputs import UnevenDDP
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, inputs, mlp, twins, values

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


def joined(model: nn.Module, batches: list[Tensor], throw: bool) -> Iterator[None]:
    """Backward of each step, on both sides alike; the optimizer steps in between."""
    if isinstance(model, UnevenDDP):
        with model.join(batches, throw=throw) as steps:
            for batch in steps:
                if batch is None:
                    model.shadow()
                else:
                    model(batch).square().mean().backward()
                yield
        return
    how = {"divide_by_initial_world_size": False, "throw_on_early_termination": throw}
    with Join([model], **how):
        for batch in batches:
            model(batch).square().mean().backward()
            yield


def pair(ctx: RankContext, counts: list[int], throw: bool = False) -> Pair:
    """Both trained with so many batches of each rank: steps taken, error, values afterwards."""
    own = [inputs(ctx, 4, 5, salt=step) for step in range(counts[ctx.rank])]
    ours, theirs = twins(mlp)
    found = []
    for model in (UnevenDDP(ours), DistributedDataParallel(theirs)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with noted() as error:
            for _ in joined(model, own, throw):
                optimizer.step()
                optimizer.zero_grad()
        found.append([[*error], values(model)])
    return found[0], found[1]


@contextmanager
def noted() -> Iterator[list[str]]:
    """The kind of the error that ended the block, if one did."""
    kinds: list[str] = []
    try:
        yield kinds
    except RuntimeError:
        kinds.append("RuntimeError")


@SCENARIOS.ported
def test_uneven_inputs(ctx: RankContext) -> Pair:
    """Rank 1 has two batches less; at the end both ranks have the same weights."""
    return pair(ctx, [5, 3])


@SCENARIOS.ported
def test_a_rank_without_any_batch(ctx: RankContext) -> Pair:
    """Rank 0 never has one, so it gets all that it has from rank 1."""
    return pair(ctx, [0, 2])


@SCENARIOS.ported
def test_even_inputs_train_as_without_a_join(ctx: RankContext) -> Pair:
    """The join does not show where ranks have as many batches."""
    return pair(ctx, [3, 3])


@SCENARIOS.ported
def test_all_ranks_raise_when_asked_to(ctx: RankContext) -> Pair:
    """Both ranks take the two steps that both have data for, and then raise."""
    return pair(ctx, [2, 4], throw=True)
