"""PyTorch's scenarios of model averaging and of uneven inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext
from solutions.phase1_data_parallel.trainer import average_gradients, train_step
from solutions.phase3_multi_node.local_sgd import LocalSGD, mean_over_ranks
from tests.pytorch_scenarios.beside import (
    Pair,
    Ran,
    Scenarios,
    gradients,
    inputs,
    mlp,
    refused,
    twins,
    values,
)

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


@SCENARIOS.ported
def test_the_mean_of_the_ranks_parameters(ctx: RankContext) -> Pair:
    """Of all ranks, and of a group of one rank."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    ours, theirs = twins(mlp)
    for model in (ours, theirs):
        for p in model.parameters():
            p.data += ctx.rank
    alone = mean_over_ranks([*ours.parameters()], groups[ctx.rank])
    mine = [*mean_over_ranks([*ours.parameters()]), *alone]
    group = groups[ctx.rank]
    before = [p.detach().clone() for p in theirs.parameters()]
    utils.average_parameters(theirs.parameters(), group)
    kept = [p.detach().clone() for p in theirs.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    utils.average_parameters(theirs.parameters(), dist.group.WORLD)
    return mine, [*theirs.parameters(), *kept]


def local_steps(ctx: RankContext, model: nn.Module, after_step: Any, steps: int) -> list[Any]:
    """Steps on the rank's own samples; what the ranks hold after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
        optimizer.step()
        after_step()
        seen.append(values(model))
    return seen


@SCENARIOS.ported
def test_an_average_in_every_third_step(ctx: RankContext) -> Pair:
    """Seven steps: two rounds end, and between them the ranks are on their own."""
    ours, theirs = twins(mlp)
    rounds = LocalSGD(ours, every=3)
    periodic = averagers.PeriodicModelAverager(period=3)
    periodic.step = 1  # torch's counts from 0 and so averages after the first step: begin at 1
    return (
        local_steps(ctx, ours, rounds.step, 7),
        local_steps(ctx, theirs, lambda: periodic.average_parameters(theirs.parameters()), 7),
    )


@SCENARIOS.ported
def test_parameters_of_several_groups(ctx: RankContext) -> Pair:
    """Two parameter groups with learning rates of their own; both are averaged."""
    ours, theirs = twins(mlp)
    found = []
    rounds = LocalSGD(ours, every=2)
    periodic = averagers.PeriodicModelAverager(period=2)
    periodic.step = 1
    for model, mean in (
        (ours, lambda groups: rounds.step()),
        (theirs, periodic.average_parameters),
    ):
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
            optimizer.step()
            mean(optimizer.param_groups)
        found.append(values(model))
    return found[0], found[1]


@SCENARIOS.ported
def test_an_optimizer_that_averages(ctx: RankContext) -> Pair:
    """torch's post-local SGD optimizer with no warm-up is local SGD after each step."""
    ours, theirs = twins(mlp)
    rounds = LocalSGD(ours, every=2)
    mine = local_steps(ctx, ours, rounds.step, 4)
    periodic = averagers.PeriodicModelAverager(period=2)
    periodic.step = 1
    inner = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, periodic)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        theirs(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
        optimizer.step()
        seen.append(values(theirs))
    return mine, seen


@SCENARIOS.ported
def test_a_period_below_one_is_refused(ctx: RankContext) -> Pair:
    """On every rank, before any message."""
    return refused(lambda: LocalSGD(mlp(), every=0)), refused(
        lambda: averagers.PeriodicModelAverager(period=0)
    )


def batches_of(ctx: RankContext, count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of four samples of three classes."""
    return [
        (inputs(ctx, 4, 5, salt=k), torch.arange(4, dtype=torch.int64) % 3) for k in range(count)
    ]


@SCENARIOS.ported
def test_a_rank_that_runs_out_of_batches(ctx: RankContext) -> Pair:
    """Rank 0 has two batches, rank 1 four: ours goes on with empty ones, torch with join.

    The mean is over the samples that there are, which is torch's division by the ranks that are
    left.
    """
    ours, theirs = twins(mlp)
    mine = batches_of(ctx, 2 + 2 * ctx.rank)
    nothing = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for x, y in (mine + [nothing] * 4)[:4]:
        train_step(ours, optimizer, x, y)
    model = DistributedDataParallel(theirs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for x, y in mine:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    # torch's joined ranks get the last one's parameters when the context ends
    return values(ours), values(theirs)


@SCENARIOS.ported
def test_gradients_weighed_by_the_samples(ctx: RankContext) -> Pair:
    """Equal numbers of samples: the mean of the ranks, as torch's wrapper gives it."""
    ours, theirs = twins(mlp)
    ours(inputs(ctx, 4, 5)).square().mean().backward()
    average_gradients(ours.parameters(), 4)
    model = DistributedDataParallel(theirs)
    model(inputs(ctx, 4, 5)).square().mean().backward()
    return gradients(ours), gradients(theirs)
