"""Checks of exercise 3.25: local SGD and DiLoCo, step by step against a simulation."""

from __future__ import annotations

import functools

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import exercise, expect_equal, fail
from tests.phase3.rounds import (
    OUTER,
    Net,
    Values,
    batches,
    compare,
    gradient_step,
    sgd,
    simulated,
    tensors,
)


def rounds_of(impl, model, every, outer, group=None):
    if outer is None:
        return impl.LocalSGD(model, every=every, group=group)
    return impl.DiLoCo(model, every=every, group=group, **outer)


def check_rounds(run, impl, seed, world_size, count, every, outer, mistakes) -> None:
    """Models that begin differently, trained in rounds; flags, tensors, outer state."""

    def body(ctx):
        model = Net(seed + ctx.rank).to(ctx.device)
        optimizer = sgd(model, momentum=0.9 if outer else 0.5)
        held = list(model.parameters())
        rounds = rounds_of(impl, model, every, outer)
        flags, found = [], []
        for x, y in batches(seed, ctx.rank, count):
            gradient_step(model, optimizer, (x.to(ctx.device), y.to(ctx.device)))
            flags.append(rounds.step())
            if flags[-1]:
                found.append(tensors(model))
        flags.append(rounds.finish())
        if flags[-1]:
            found.append(tensors(model))
        same = all(a is b for a, b in zip(held, model.parameters(), strict=True))
        state = [t.cpu() for t in (*rounds.common, *rounds.velocity)] if outer else []
        if any(t.requires_grad for t in state):
            same = "common and velocity have an autograd history"
        return flags, found, same, state

    results = run(body, world_size)
    wanted = simulated(seed, world_size, count, every, outer)

    @functools.cache
    def known(mistake: str) -> list[Values]:
        """The model's prediction; asked only where a value is wrong."""
        return simulated(seed, world_size, count, every, outer, mistake=mistake)

    kind = "DiLoCo" if outer else "local SGD"
    what = f"{kind}, {world_size} ranks, {count} steps in rounds of {every}"
    flags = [(n + 1) % every == 0 for n in range(count)] + [count % every > 0]
    first = results[0][3]
    own = sum(p.nbytes for p in Net(seed).parameters() if p.requires_grad)
    held = sum(t.nbytes for t in first)
    expect_equal(held, 2 * own * bool(outer), what=f"{what}: bytes of outer state", cause="state")
    for rank, (_, _, _, state) in enumerate(results):
        if any(not torch.equal(a, b) for a, b in zip(state, first, strict=True)):
            problem = f"{what}: common and velocity differ between rank 0 and rank {rank}"
            fail(problem, cause="outer-state", rank=rank)
    for rank, (_, got, _, _) in enumerate(results):
        for name in got[-1] if got else ():
            if not torch.equal(got[-1][name], results[0][1][-1][name]):
                problem = f"{what}: {name} differs in the last bits between ranks 0 and {rank}"
                near = torch.allclose(got[-1][name].double(), results[0][1][-1][name].double())
                if near:
                    fail(problem, cause="ranks-differ", rank=rank)
    for rank, (_, got, _, _) in enumerate(results):
        if got and not torch.equal(got[0]["frozen.weight"], Net(seed).frozen.weight):
            said = f"{what}: a frozen parameter on rank {rank} is not rank 0's: all start from it"
            fail(said, cause="not-shared", rank=rank)
    start = tensors(Net(seed))
    for rank, (got_flags, got, same, _) in enumerate(results):
        compare(got, wanted, what=what, rank=rank, mistakes=mistakes, predict=known, before=start)
        expect_equal(got_flags, flags, what=f"{what}: what step() and finish() return", rank=rank)
        expect_equal(same, True, what=f"{what}: parameters are the same objects", rank=rank)


@exercise(
    "3.25",
    "virtual gloo cuda",
    asserts="rounds in-place start parameters dtype layout life mean",
)
def test_rounds_of_local_sgd(impl, run, seed, cases):
    """Rounds of local SGD equal their definition, the last short one too; momentum stays local."""
    mistakes = "round-too-long", "inner-state-averaged", "inner-state-reset", "statistics-of-first"
    for world_size, count, every in cases((3, 7, 3), (2, 4, 2), (4, 3, 8), (1, 3, 2), (2, 0, 3)):
        check_rounds(run, impl, seed, world_size, count, every, None, mistakes)


@exercise(
    "3.25",
    "virtual gloo cuda",
    asserts="outer outer-state rounds in-place same-bits resources",
)
def test_rounds_of_diloco(impl, run, seed, cases):
    """The outer optimizer is torch's SGD with Nesterov momentum on the mean difference."""
    mistakes = ("classic-momentum", "outer-momentum-lost", "uphill", "round-too-long")
    for world_size, count, every in cases((3, 8, 3), (2, 6, 2), (4, 5, 1), (1, 4, 2)):
        check_rounds(run, impl, seed, world_size, count, every, OUTER, mistakes)


@exercise("3.25", "virtual", asserts="rounds mean")
def test_one_step_per_round_is_data_parallelism(impl, run, seed):
    """With H=1 and plain SGD the ranks train like one process on all their samples."""

    def body(ctx):
        model = Net(seed + ctx.rank)
        optimizer, rounds = sgd(model), impl.LocalSGD(model, every=1)
        for batch in batches(seed, ctx.rank, 4):
            gradient_step(model, optimizer, batch)
            rounds.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    for world_size, results in zip((3, 1, 2), run.worlds(body, (3, 1, 2)), strict=True):
        alone = Net(seed)
        optimizer = sgd(alone)
        data = [batches(seed, rank, 4) for rank in range(world_size)]
        for step in zip(*data, strict=True):
            gradient_step(alone, optimizer, [torch.cat(part) for part in zip(*step, strict=True)])
        wanted = {name: p.detach() for name, p in alone.named_parameters()}
        for rank, got in enumerate(results):
            compare([got], [wanted], what=f"H=1 on {world_size} ranks, 4 steps", rank=rank)


@exercise("3.25", "virtual gloo", asserts="round-cost cost")
def test_bytes_of_a_round(impl, run, seed):
    """One all-reduce per round of the trained parameters: a factor H less than in every step."""
    steps, every = 6, 3

    def body(ctx):
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
        model[1].requires_grad_(False)
        optimizer = sgd(model, momentum=0.9)
        rounds = rounds_of(impl, model, every, OUTER if ctx.seed % 2 else None)
        for number in range(steps):
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
            with ctx.region("end" if (number + 1) % every == 0 else "inside"):
                rounds.step()
        with ctx.region("after"):
            rounds.finish()
        return sum(p.nbytes for p in model.parameters() if p.requires_grad)

    results = run(body, 3)
    for log, nbytes in zip(results.logs, results, strict=True):
        for region, when in (("inside", "inside a round"), ("after", "in finish() without a step")):
            if log.select(region=region).events:
                fail(
                    f"rank {log.rank} communicates {when}: a round ends with its only all-reduce",
                    cause="not-at-the-end",
                    rank=log.rank,
                )
        ends = log.select(region="end")
        ends.all_waited()
        share = steps / every * 4 / 3 * nbytes
        ends.sent_at_most(share + 64, "2(W-1)/W of the trainable bytes, once per round")
        ends.sent_at_least(share - 64, "2(W-1)/W of the trainable bytes, once per round")
        if ends.messages > 2 * steps / every:  # a reduce-scatter and an all-gather do as well
            fail(
                f"rank {log.rank} issued {ends.messages} collectives in 2 rounds of one dtype: "
                "join the tensors, one message is enough for each",
                cause="too-many-messages",
                rank=log.rank,
            )
