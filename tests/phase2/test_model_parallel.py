"""Checks of exercise 2.8: costs, the cut, and training with the layers on several ranks."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from itertools import combinations, pairwise

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference.workloads import GPT

VOCABULARY, LENGTH, BLOCKS, WIDTH = 13, 6, 3, 8
BOUNDS = {1: [0, 5], 2: [0, 2, 5], 3: [0, 1, 3, 5], 4: [0, 1, 2, 4, 5]}  # of the five layers


def gpt(seed: int, dtype=torch.float64, device="cpu") -> GPT:
    """Embedding, three blocks, head; the first and the last layer share a weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(VOCABULARY, LENGTH, BLOCKS, WIDTH, 2).to(device, dtype)


def mlp(seed: int, dtype=torch.float64, device="cpu") -> nn.Sequential:
    """Five layers of different width, the first one frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)]
        layers[0].requires_grad_(False)
        return nn.Sequential(*layers).to(device, dtype)


def batches(seed: int, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches for ``gpt`` or ``mlp``; the last one is smaller."""
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    made = []
    for size in (4, 4, 3):
        tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        if isinstance(model, nn.Sequential):
            inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(p.dtype)
            targets = targets[:size]
        made.append((inputs.to(p.device), targets.to(p.device)))
    return made


def parameters_of(layers: list[nn.Module], values: str = "data") -> list[torch.Tensor]:
    """What the layers' parameters hold, in order; tied ones once."""
    found = nn.ModuleList(layers).parameters()
    return [torch.zeros(0) if (v := getattr(p, values)) is None else v.cpu() for p in found]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


# -- the cut --------------------------------------------------------------------------------------
def bottleneck(costs: list[float], bounds: list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def best_bottleneck(costs: list[float], stages: int) -> float:
    """By trying every cut."""
    places = combinations(range(1, len(costs)), stages - 1)
    return min(bottleneck(costs, [0, *cut, len(costs)]) for cut in places)


def cost_lists(seed: int) -> list[tuple[list[float], int]]:
    chance = random.Random(seed)
    fixed = [([9, 1, 1, 1, 1, 1], 2), ([1, 1, 1, 1, 9], 3), ([4, 5, 6, 5, 4, 6, 9], 3)]
    fixed += [([0, 0, 0, 7], 3), ([3], 1), ([2, 2], 2), ([50, *[7] * 10, 61], 4), ([5] * 8, 3)]
    drawn = [[chance.randint(0, 20) for _ in range(n)] for n in (4, 7, 9, 10)]
    drawn += [[chance.random() for _ in range(n)] for n in (6, 9)]
    return fixed + [(costs, s) for costs in drawn for s in range(1, min(6, len(costs)) + 1)]


@exercise("2.8", "virtual")
def test_partition_is_the_best_one(impl, run, seed):
    """Contiguous, no stage empty, and no other cut has a cheaper most expensive stage."""
    cases = cost_lists(seed)

    def body(ctx):
        twice = [[list(impl.partition(list(c), s)) for c, s in cases] for _ in range(2)]
        long = impl.partition([1.0 + 0.5 * (k % 3) for k in range(120)], 8)
        return *twice, list(long)

    first, again, long = run(body, 1)[0]
    for (costs, stages), bounds in zip(cases, first, strict=True):
        what = f"partition({costs}, {stages})"
        sizes = [b - a for a, b in pairwise(bounds)]
        if len(sizes) != stages or bounds[0] != 0 or bounds[-1] != len(costs):
            text = f"{what}: expected {stages + 1} bounds from 0 to {len(costs)}, got {bounds}"
            fail(text, cause="not-a-partition")
        if min(sizes) < 1:
            fail(f"{what} = {bounds}: a stage without layers", cause="empty-stage")
        best, got = best_bottleneck(costs, stages), bottleneck(costs, bounds)
        if got > best + 1e-9:
            text = f"{what} = {bounds}: its largest stage costs {got:g}, possible is {best:g}"
            fail(text, cause="not-optimal")
    expect_equal(again, first, what="the same costs cut a second time", cause="not-deterministic")
    costs = [1.0 + 0.5 * (k % 3) for k in range(120)]
    if bottleneck(costs, long) > 23.0:
        fail("120 layers, 8 stages: a bottleneck of 23 is possible", cause="not-optimal")


@exercise("2.8", "virtual")
def test_partition_refuses(impl, run):
    """More stages than layers, none, or costs that are no costs: ValueError with the numbers."""
    wrong = [([1, 2, 3], 5), ([1, 2], 0), ([], 1), ([1, -2, 3], 2), ([1, math.nan], 2)]

    def body(ctx):
        said = []
        for costs, stages in wrong:
            try:
                said.append(f"accepted: {impl.partition(costs, stages)}")
            except ValueError as error:
                said.append(str(error))
        return said

    said = run(body, 1)[0]
    for (costs, stages), text in zip(wrong, said, strict=True):
        if text.startswith("accepted"):
            fail(f"partition({costs}, {stages}): expected a ValueError, {text}", cause="accepted")
    if "3" not in said[0] or "5" not in said[0]:
        text = f"5 stages for 3 layers: the message lacks a number: {said[0]!r}"
        fail(text, cause="message")


@exercise("2.8", "virtual")
def test_parameter_costs_count_tied_weights_once(impl, run, seed):
    """Bytes per layer; the tied embedding counts in the first layer only."""

    def body(ctx):
        models = gpt(seed, torch.float32), gpt(seed, torch.float64)
        return [list(impl.parameter_costs(impl.layers_of(model))) for model in models]

    for got, size in zip(run(body, 1)[0], (4, 8), strict=True):
        block = sum(p.numel() for p in gpt(seed).blocks[0].parameters()) * size
        want = [(VOCABULARY + LENGTH) * WIDTH * size, *[block] * BLOCKS, 2 * WIDTH * size]
        cause = "tied-twice" if sum(got) == sum(want) + VOCABULARY * WIDTH * size else "wrong"
        what = "bytes of embedding, blocks and head, which shares the embedding's weight"
        expect_equal(got, want, what=what, cause=cause)


class Busy(torch.autograd.Function):
    """Takes time forward and backward, and changes nothing."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        time.sleep(forward)
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Sleepy(nn.Module):
    """A layer that takes known times; slow in its first call, and disturbed once later on."""

    def __init__(self, calls: Counter, name: int, forward: float, backward: float) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)
        self.seconds = forward, backward

        def slowness() -> float:
            calls[name] += 1
            return {1: 50.0, 3: 9.0}.get(calls[name], 1.0)

        self.slowness = slowness  # copies of the layer share it

    def forward(self, x):
        slow = self.slowness()
        y = F.dropout(self.norm(x * self.scale), 0.1)
        return Busy.apply(y, *(s * slow for s in self.seconds))


TIMES = [(0.002, 0.003), (0.005, 0.010), (0.001, 0.004)]


@exercise("2.8", "virtual")
def test_measured_costs_are_one_ranks_medians(impl, run, seed):
    """Forward and backward, the median after a warm-up, rank 0's numbers for all, no trace left."""

    def body(ctx):
        calls = Counter()
        times = [(a * (1 + ctx.rank), b * (1 + ctx.rank)) for a, b in TIMES]
        layers = [Sleepy(calls, k, *seconds) for k, seconds in enumerate(times)]
        for layer in layers:
            layer.scale.grad = torch.ones(4)

        def state():
            held = [t.clone() for n in layers for t in (*n.parameters(), *n.buffers())]
            return [*held, *[n.scale.grad.clone() for n in layers], torch.get_rng_state()]

        example = torch.rand(8, 4)
        before = state()
        got = impl.measured_costs(layers, example, repeats=5)
        return list(got), all(map(torch.equal, before, state()))

    results = run(body, 3)
    want = [forward + backward for forward, backward in TIMES]
    if len({tuple(got) for got, _ in results}) > 1:
        text = f"the ranks return different costs and would cut apart: {[g for g, _ in results]}"
        fail(text, cause="ranks-differ")
    for rank, (got, same) in enumerate(results):
        causes = {"forward-only": [a for a, _ in TIMES], "": want}
        found = [c for c, w in causes.items() if max(map(abs, map(float.__sub__, got, w))) < 1e-4]
        if "" not in found:
            text = f"costs of layers that take {want} s (rank 0's medians): got {got}"
            fail(text, cause=found[0] if found else "not-the-median", rank=rank)
        what = "weights, buffers, gradients and random state as before"
        expect_equal(same, True, what=what, rank=rank, cause="trace-left")


# -- training -------------------------------------------------------------------------------------
def check_gradients(run, impl, seed: int, world_size: int, make) -> None:
    bounds = BOUNDS[world_size]

    def body(ctx):
        model = make(seed, device=ctx.device)
        stage = impl.Stage(impl.layers_of(model), bounds)
        impl.forward_backward(stage, *batches(seed, model)[0])
        impl.reduce_ties(stage)
        alone = make(seed, device=ctx.device)
        inputs, targets = batches(seed, alone)[0]
        F.cross_entropy(alone(inputs), targets).backward()
        layers = impl.layers_of(alone)[bounds[ctx.rank] : bounds[ctx.rank + 1]]
        return parameters_of([stage], "grad"), parameters_of(layers, "grad")

    results = run(body, world_size)
    for rank, (grads, want) in enumerate(results):
        what = f"{make.__name__} in {world_size} stages, stage {rank}"
        if len(grads) != len(want):
            text = f"{what}: {len(grads)} parameters, expected {len(want)}, those of its layers"
            fail(text, cause="wrong-layers", rank=rank)
        for k, (got, right) in enumerate(zip(grads, want, strict=True)):
            if right.any() and not (got.numel() and got.any()):
                text = f"{what}: no gradient comes to its parameter {k}: does the gradient of its "
                fail(text + "last activation come back?", cause="no-gradient", rank=rank)
        for k, (got, right) in enumerate(zip(grads, want, strict=True)):
            name = f"{what}: gradient of its parameter {k}"
            expect_close(got, right, what=name, rank=rank, rtol=1e-9, atol=1e-11)


@exercise("2.8", "virtual gloo cuda")
def test_gradients_of_every_stage(impl, run, seed, cases):
    """forward_backward gives every stage the gradients of one process; tied ones are summed."""
    for world_size, make in cases((3, gpt), (2, gpt), (4, mlp), (1, gpt)):
        check_gradients(run, impl, seed, world_size, make)


def check_training(run, impl, seed, world_size: int, make, dtype=torch.float64) -> None:
    bounds = BOUNDS[world_size]

    def body(ctx):
        model = make(seed, dtype, ctx.device)
        data = batches(seed, model)
        stage = impl.Stage(impl.layers_of(model), bounds)
        optimizer = sgd(stage.parameters()) if list(stage.parameters()) else None
        optimizer = optimizer or sgd([nn.Parameter(torch.zeros(1))])  # a stage of activations only
        losses = [float(impl.train_step(stage, optimizer, *batch)) for batch in data]
        alone, want = make(seed, dtype, ctx.device), []
        optimizer = sgd(alone.parameters())
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(alone(inputs), targets)
            loss.backward()
            optimizer.step()
            want.append(loss.item())
        layers = impl.layers_of(alone)[bounds[ctx.rank] : bounds[ctx.rank + 1]]
        return losses, want, parameters_of([stage]), parameters_of(layers)

    results = run(body, world_size)
    what = f"{make.__name__}, {str(dtype)[6:]}, {world_size} stages"
    close = {torch.float64: {"rtol": 1e-9, "atol": 1e-11}, torch.float32: {"rtol": 1e-4}}
    for rank in reversed(range(world_size)):
        losses, want, got, right = results[rank]
        for step, (loss, true) in enumerate(zip(losses, want, strict=True)):
            if not math.isclose(loss, true, rel_tol=1e-6):
                text = f"{what}: loss of step {step} on rank {rank} is {true:g}, got {loss:g}"
                more = "; the last stage knows it" if rank < world_size - 1 else ""
                fail(text + more, cause="loss-value", rank=rank)
        for k, (a, b) in enumerate(zip(got, right, strict=True)):
            name = f"{what}, stage {rank}: parameter {k} after three steps"
            expect_close(a, b, what=name, rank=rank, **close.get(dtype, {}))


@exercise("2.8", "virtual gloo cuda")
def test_training_equals_one_process(impl, run, seed, cases):
    """train_step three times, last batch smaller: one process's weights, its loss on all ranks."""
    for world_size, make, dtype in cases(
        (3, gpt, torch.float64),
        (4, mlp, torch.float64),
        (2, gpt, torch.bfloat16),
        (4, gpt, torch.float32),
        (1, mlp, torch.float64),
    ):
        check_training(run, impl, seed, world_size, make, dtype)


@trace("2.8")
def trace_split(impl):
    """Three steps of a small GPT, cut by parameter bytes: one rank works at a time."""

    def body(ctx):
        layers = impl.layers_of(GPT(96, 32, 6, 64, 4))
        bounds = impl.partition(impl.parameter_costs(layers), ctx.world_size)
        stage = impl.Stage(layers, bounds)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        tokens = torch.randint(0, 96, (8, 33))
        for step in range(4):
            if step == 1:
                dist.barrier()
                ctx.start_picture()
            impl.train_step(stage, optimizer, tokens[:, :-1], tokens[:, 1:].flatten())

    return body
