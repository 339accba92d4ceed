"""Checks of exercise 2.20: what the layers cost, and where to divide them into stages."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.reference.workloads import GPT

VOCABULARY, LENGTH, BLOCKS, WIDTH = 13, 6, 3, 8


def gpt(seed: int, dtype: torch.dtype = torch.float64) -> GPT:
    """Embedding, three blocks, head; the first and the last layer share a weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(VOCABULARY, LENGTH, BLOCKS, WIDTH, 2).to(dtype=dtype)


def layers_of(model: GPT) -> list[nn.Module]:
    """The parameters of each layer of the model, embedding and head included."""
    first = nn.ModuleList([model.tokens, model.places])
    return [first, *model.blocks, nn.ModuleList([model.norm, model.head])]


def bottleneck(costs: list[float], bounds: list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def best_bottleneck(costs: list[float], stages: int) -> float:
    """By trying all bounds."""
    inner = combinations(range(1, len(costs)), stages - 1)
    return min(bottleneck(costs, [0, *bounds, len(costs)]) for bounds in inner)


def cost_lists(seed: int) -> list[tuple[list[float], int]]:
    chance = random.Random(seed)
    fixed = [([9, 1, 1, 1, 1, 1], 2), ([1, 1, 1, 1, 9], 3), ([4, 5, 6, 5, 4, 6, 9], 3)]
    fixed += [([0, 0, 0, 7], 3), ([3], 1), ([2, 2], 2), ([50, *[7] * 10, 61], 4), ([5] * 8, 3)]
    drawn = [[chance.randint(0, 20) for _ in range(n)] for n in (4, 7, 9, 10)]
    drawn += [[chance.random() for _ in range(n)] for n in (6, 9)]
    return fixed + [(costs, s) for costs in drawn for s in range(1, min(6, len(costs)) + 1)]


@exercise("2.20", "virtual")
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


@exercise("2.20", "virtual")
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


@exercise("2.20", "virtual")
def test_parameter_costs_count_tied_weights_once(impl, run, seed):
    """Bytes per layer; the tied embedding counts in the first layer only."""

    def body(ctx):
        models = gpt(seed, torch.float32), gpt(seed, torch.float64)
        return [list(impl.parameter_costs(layers_of(model))) for model in models]

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


@exercise("2.20", "virtual")
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
            grads = [n.scale.grad.clone() for n in layers]
            return [t.detach() for t in (*held, *grads, torch.get_rng_state())]

        example = torch.rand(8, 4)
        before = state()
        got = impl.measured_costs(layers, example, repeats=5)
        return list(got), before, state()

    results = run(body, 3)
    want = [forward + backward for forward, backward in TIMES]
    if len({tuple(got) for got, _, _ in results}) > 1:
        text = f"the ranks return different costs and would cut apart: {[g for g, *_ in results]}"
        fail(text, cause="ranks-differ")
    for rank, (got, before, after) in enumerate(results):
        causes = {"forward-only": [a for a, _ in TIMES], "": want}
        found = [c for c, w in causes.items() if max(map(abs, map(float.__sub__, got, w))) < 1e-4]
        if "" not in found:
            text = f"costs of layers that take {want} s (rank 0's medians): got {got}"
            fail(text, cause=found[0] if found else "not-the-median", rank=rank)
        what = "weights, buffers, gradients and random state as before"
        same = all(map(torch.equal, before, after))
        expect_equal(same, True, what=what, rank=rank, cause="trace-left")


@exercise("2.20", "virtual")
def test_a_subgroup_measures_for_itself(impl, run):
    """The first rank of the group measures, not global rank 0, and the group's ranks agree."""

    def body(ctx):
        group = dist.new_group([1, 3])
        if ctx.rank not in (1, 3):
            return []
        layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
        return list(impl.measured_costs(layers, torch.ones(2, 4), group=group))

    results = run(body, 4)
    if len(results[1]) != 3:
        fail(f"three layers have three costs, got {results[1]}", cause="wrong-number", rank=1)
    if not all(cost > 0 for cost in results[1]):
        fail(f"no layer takes 0 s: nobody measured, got {results[1]}", cause="not-measured", rank=1)
    what = "measured costs of the group's ranks"
    expect_equal(results[3], results[1], what=what, rank=3, cause="ranks-differ")


@trace("2.20")
def trace_stages(impl):
    """Twelve layers, divided by measured costs: each rank runs its stage, all take alike long."""

    def body(ctx):
        widths = [512, 64, 64, 64, 1024, 1024, 64, 64, 512, 512, 64, 64, 64]
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        example = torch.ones(256, widths[0])
        bounds = impl.partition(impl.measured_costs(layers, example), ctx.world_size)
        dist.barrier()
        ctx.start_picture()
        for number in range(bounds[ctx.rank], bounds[ctx.rank + 1]):
            x = torch.ones(256, widths[number], requires_grad=True)
            with ctx.span("forward", str(number)):
                y = layers[number](x)
            with ctx.span("backward", str(number)):
                y.sum().backward()

    return body
