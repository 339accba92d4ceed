"""Checks of exercise 4.4, continued: whole runs that go on with other numbers of ranks."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from tests.phase4.checkpoints import difference
from tests.phase4.memory_checkpoints import fake_saved
from tests.phase4.small_training import raw_bits

SIZE, BATCH, WIDTH, EPOCHS = 22, 6, 7, 2
STEPS = EPOCHS * 4  # the last batch of an epoch has 4 samples


class ShardedMomentum:
    """SGD with momentum and a decaying learning rate; every rank has a shard of the momentum."""

    def __init__(self, impl, weight: Tensor, rank: int, world_size: int) -> None:
        self.impl, self.weight, self.rank, self.world_size = impl, weight, rank, world_size
        shard = -(-WIDTH // world_size)
        self.velocity = torch.zeros(shard, dtype=torch.float64)
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        shard = len(self.velocity)
        room = torch.zeros(shard * self.world_size, dtype=torch.float64)
        room[:WIDTH] = gradient
        self.velocity.mul_(0.9).add_(room[self.rank * shard : (self.rank + 1) * shard])
        parts = [torch.empty_like(self.velocity) for _ in range(self.world_size)]
        dist.all_gather(parts, self.velocity)
        self.weight.data.sub_(torch.cat(parts)[:WIDTH], alpha=0.05 * 0.95**self.steps)
        self.steps += 1

    def state_dict(self):
        own = self.impl.cut(self.velocity, WIDTH, self.world_size, self.rank)
        return {"velocity": own, "steps": self.steps}

    def load_state_dict(self, state) -> None:
        shard = state["velocity"]["chunk"]
        self.velocity[: len(shard)] = shard
        self.steps = state["steps"]


class Line(torch.nn.Module):
    """A linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sum(1) + 0.1 * torch.randn(SIZE, generator=generator, dtype=torch.float64)


def train(impl, ctx, seed: int, trees, steps: int):
    """Train to ``steps`` from a checkpoint's trees: losses, weight, and the state
    that this rank would save."""
    resume = impl.module("resume")
    x, y = data(seed)
    model = Line()
    optimizer = ShardedMomentum(impl, model.weight, ctx.rank, ctx.world_size)
    dealt = impl.module("elastic_sampler")
    sampler = dealt.ElasticSampler(
        SIZE, global_batch_size=BATCH, rank=ctx.rank, world_size=ctx.world_size, seed=seed
    )
    loader = torch.utils.data.DataLoader(torch.arange(SIZE), batch_sampler=sampler, collate_fn=list)
    state = resume.TrainingState(
        sampler=sampler, own=["optimizer"], model=model, optimizer=optimizer
    )
    position = resume.Position()
    if trees is not None:
        shared, owns = trees
        saved, _ = fake_saved(owns, shared["position"]["step"], shared)
        position = state.restore(impl.adapt(saved, ctx.world_size, seed))
    losses = []
    for batch in resume.batches(loader, position, EPOCHS):
        mine = [int(i) for i in batch]
        total = sampler.size_of(position.batch - 1)
        squares = (model(x[mine]) - y[mine]).square()
        loss = squares.sum() / max(len(mine), 1)
        model.weight.grad = None
        (loss * dealt.loss_weight(len(mine), total, ctx.world_size)).backward()
        numbers = torch.cat(
            [model.weight.grad / ctx.world_size, squares.detach().sum()[None] / total]
        )
        dist.all_reduce(numbers)
        optimizer.step(numbers[:WIDTH])
        losses.append(numbers[WIDTH])
        if position.step == steps:
            break
    return torch.stack(losses), model.weight.detach().clone(), state.capture(position)


def alone(seed: int) -> tuple[Tensor, Tensor]:
    """Losses and weight of one process that is never interrupted, written down plainly."""
    x, y = data(seed)
    weight = torch.zeros(WIDTH, dtype=torch.float64)
    velocity, losses = torch.zeros_like(weight), []
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(seed + epoch)
        for mine in torch.randperm(SIZE, generator=generator).split(BATCH):
            error = x[mine] @ weight - y[mine]
            velocity = 0.9 * velocity + 2 * error @ x[mine] / len(mine)
            weight = weight - 0.05 * 0.95 ** len(losses) * velocity
            losses.append(error.square().mean())
    return torch.stack(losses), weight


@exercise("4.4", "virtual gloo", asserts="restored")
def test_loss_curve_is_the_uninterrupted_one(impl, run, seed, cases):
    """4 ranks, then 2, 3, 1 or 5, and 4 again: losses and weights of a run that never stopped."""
    want_losses, want_weight = alone(seed)
    for worlds in cases((4, 2, 4), (4, 3), (4, 1, 3), (2, 5)):
        trees, losses = None, []
        for number, world_size in enumerate(worlds):
            until = STEPS if number == len(worlds) - 1 else 3 + 2 * number

            def body(ctx):
                return train(impl, ctx, seed, trees, until)

            results = run(body, world_size)
            losses.append(results[0][0])
            trees = results[0][2][0], [result[2][1] for result in results]
        name = "→".join(map(str, worlds))
        got = torch.cat(losses)
        expect_equal(len(got), STEPS, what=f"steps of {name} ranks together", cause="steps")
        expect_close(got, want_losses, what=f"losses of {name} ranks", rtol=1e-9, atol=1e-11)
        for rank, (_, weight, _) in enumerate(results):
            expect_close(
                weight,
                want_weight,
                what=f"weights of {name} ranks",
                rank=rank,
                rtol=1e-9,
                atol=1e-11,
            )


# -- random streams -------------------------------------------------------------------------------
def seed_all(seed: int) -> None:
    for seeding in (torch.default_generator.manual_seed, np.random.seed, random.seed):
        seeding(seed)


def next_numbers() -> list[float]:
    return [torch.rand(3).tolist(), float(np.random.rand()), random.random()]


def first_numbers(seed: int) -> list[float]:
    """The result of ``next_numbers`` after ``seed_all``, from separate generators."""
    generator = torch.Generator().manual_seed(seed)
    numbers = np.random.RandomState(seed).rand(), random.Random(seed).random()
    return [torch.rand(3, generator=generator).tolist(), *map(float, numbers)]


def draws(seeds, tree) -> list[float]:
    """The next numbers of all streams of a tree; this process's own stay where they are."""
    before = seeds.random_state()
    seeds.set_random_state(tree["random"])
    numbers = next_numbers()
    seeds.set_random_state(before)
    for name in ("noise", "mixup"):
        generator = torch.Generator()
        generator.set_state(tree["parts"][name])
        numbers.append(torch.rand(3, generator=generator).tolist())
    return [str(number) for number in numbers]


def saved_by(seeds, ranks: int, step: int, seed: int):
    """A checkpoint whose ranks have streams of their own."""
    before = seeds.random_state()
    trees = []
    for rank in range(ranks):
        seed_all(seed + 31 * rank)
        shard = {"numel": 2 * ranks, "chunk": torch.tensor([1.0, 2]) + 2 * rank}
        noise, mixup = (
            torch.Generator().manual_seed(seed + 17 * rank + salt).get_state()
            for salt in (1 << 20, 1 << 21)
        )
        parts = {"noise": noise, "optimizer": {"m": shard}, "mixup": mixup}
        tree = {"random": seeds.random_state(), "parts": parts, "sampler": {"consumed": 3}}
        trees.append(tree)
    seeds.set_random_state(before)
    return fake_saved(trees, step)[0]


KINDS = ("torch", "numpy", "random", "a generator", "a second generator")
# step, what is added to the seed, rank: keys that meet under sums, products or digits
KEYS = [(11, 0, 12), (12, 0, 11), (1, 0, 20), (2, 0, 10), (12, 0, 3), (1, 0, 23), (13, 0, 2)]
KEYS += [(11, 1, 11), (10, 1, 12), (21, 0, 22), (0, 0, 32), (1009, 0, 2), (0, 1, 2), (0, 0, 2)]


@exercise(
    "4.4", "virtual", asserts="own-streams new-streams itself stays randomness life resources as-if"
)
def test_random_streams(impl, run, seed):
    """Ranks that existed go on with their numbers; new ranks have numbers that no rank has had."""

    def body(ctx):
        seeds = impl.module("sample_seeds")
        saved = saved_by(seeds, 2, 7, seed)
        old = [draws(seeds, saved.own(r)) for r in range(2)]
        later = saved_by(seeds, 2, 8, seed)
        checkpoints = (
            impl.adapt(saved, 5, seed),
            impl.adapt(saved, 5, seed),
            impl.adapt(later, 5, seed),
            impl.adapt(saved, 5, seed + 1),
        )
        before = copy.deepcopy([saved.own(r) for r in range(2)])
        trees = [[c.own(r) for r in range(5)] for c in checkpoints]
        seed_all(3)
        checkpoints[0].own(4)
        untouched = next_numbers()
        grown = [[draws(seeds, tree) for tree in ranks] for ranks in trees]
        shrunk = draws(seeds, impl.adapt(saved, 1, seed).own(0))
        changed = difference([saved.own(r) for r in range(2)], before)
        cut = [tree["parts"]["optimizer"]["m"]["chunk"].tolist() for tree in trees[0]]
        rest = [tree["sampler"] for tree in trees[0]]
        adapted = checkpoints[0]
        facts = [adapted.step, adapted.world_size, adapted.metadata, changed, cut, rest]
        many = {}
        for key in KEYS:
            step, salt, rank = key
            tree = impl.adapt(saved_by(seeds, 2, step, seed), 99, seed + salt).own(rank)
            many[key] = draws(seeds, tree)
        seeds.set_random_state(trees[0][4]["random"])
        same = impl.adapt(saved, 2, seed) is saved
        return raw_bits(), old, grown, shrunk, untouched, same, facts, many

    bits, old, (grown, again, later, seeded), shrunk, untouched, same, facts, many = run(body, 1)[0]
    for one, other in (("torch", "numpy"), ("torch", "random"), ("numpy", "random")):
        if bits[one] == bits[other]:
            message = f"{one} and {other} draw the same bits on rank 4 of 5: they have the same"
            fail(f"{message} generator, and were given the same seed", cause="same-stream", rank=4)
    want = [7, 5, {}, "", [[1.0], [2.0], [3.0], [4.0], []], [{"consumed": 3}] * 5]
    what = "for 5 ranks: step, world size, metadata, changes of what was saved, shards, samplers"
    expect_equal(facts, want, what=what, cause="as-if")
    expect_equal(same, True, what="adapt for as many ranks gives saved itself", cause="not-itself")
    expect_equal(grown[:2], old, what="streams of ranks 0 and 1 of 5", cause="stream-lost")
    expect_equal(shrunk, old[0], what="streams of rank 0, alone now", cause="stream-lost")
    expect_equal(again, grown, what="streams when resumed once more", cause="not-repeatable")
    every = {(f"rank {rank} of 5", rank): numbers for rank, numbers in enumerate(grown)}
    every |= {(f"rank {r} of 5, saved at step 8", r): later[r] for r in range(2, 5)}
    every |= {(f"rank {r} of 5, of seed + 1", r): seeded[r] for r in range(2, 5)}
    for (step, salt, rank), numbers in many.items():
        every[f"rank {rank} of 99, saved at step {step}, of seed + {salt}", rank] = numbers
    seen: dict[str, str] = {}
    for (what, rank), numbers in every.items():
        for kind, number in zip(KINDS, numbers, strict=True):
            if number in seen:
                message = f"{kind} on {what} draws the same as {seen[number]}"
                message += ": equal streams give equal dropout"
                fail(message, cause="same-stream", rank=rank)
            seen[number] = f"{kind} on {what}"
    stay = untouched == first_numbers(3)
    expect_equal(stay, True, what="the streams of this process stay", cause="moved-stream")


@trace("4.4")
def trace_elastic(impl):
    """Eight steps whose batches of six don't divide by the number of ranks."""

    def body(ctx):
        ctx.start_picture()
        train(impl, ctx, 0, None, STEPS)

    return body
