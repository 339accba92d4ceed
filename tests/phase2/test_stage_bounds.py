"""Checks of exercise 2.20: the costs of the layers, and where to divide them into stages."""

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

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
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
    drawn += [[chance.random() * size for _ in range(7)] for size in (1e-9, 1e15)]
    return fixed + [(costs, s) for costs in drawn for s in range(1, min(6, len(costs)) + 1)]


@exercise("2.20", "virtual", asserts="bounds best same-bounds unchanged life")
def test_partition_is_the_best_one(impl, run, seed):
    """Contiguous, no stage empty, and no other cut has a cheaper most expensive stage."""
    cases = cost_lists(seed)

    def body(ctx):
        twice = [[list(impl.partition(list(c), s)) for c, s in cases] for _ in range(2)]
        given = [1.0 + 0.5 * (k % 3) for k in range(120)]
        long = impl.partition(given, 8)
        shapes = [type(bound).__name__ for bound in long]
        kept = given == [1.0 + 0.5 * (k % 3) for k in range(120)]
        tuples = [list(impl.partition(tuple(c), s)) for c, s in cases]
        return *twice, tuples, list(long), shapes, kept

    first, again, tuples, long, shapes, kept = run(body, 1)[0]
    expect_equal(set(shapes), {"int"}, what="the type of the bounds", cause="type")
    expect_equal(kept, True, what="the costs are as before", cause="costs-changed")
    expect_equal(tuples, first, what="bounds for tuples of costs", cause="not-deterministic")
    for (costs, stages), bounds in zip(cases, first, strict=True):
        what = f"partition({costs}, {stages})"
        sizes = [b - a for a, b in pairwise(bounds)]
        if len(sizes) != stages or bounds[0] != 0 or bounds[-1] != len(costs):
            text = f"{what}: expected {stages + 1} bounds from 0 to {len(costs)}, got {bounds}"
            fail(text, cause="not-a-partition")
        if min(sizes) < 1:
            fail(f"{what} = {bounds}: a stage without layers", cause="empty-stage")
        best, got = best_bottleneck(costs, stages), bottleneck(costs, bounds)
        if got > best * (1 + 1e-9):
            text = f"{what} = {bounds}: its largest stage costs {got:g}, possible is {best:g}"
            fail(text, cause="not-optimal")
    expect_equal(again, first, what="the same costs cut a second time", cause="not-deterministic")
    costs = [1.0 + 0.5 * (k % 3) for k in range(120)]
    if bottleneck(costs, long) > 23.0:
        fail("120 layers, 8 stages: a bottleneck of 23 is possible", cause="not-optimal")


@exercise("2.20", "virtual", asserts="refused refusals")
def test_partition_refuses(impl, run):
    """More stages than layers, none, or costs that are no costs: ValueError."""
    wrong = [([1, 2, 3], 5), ([1, 2], 0), ([1, 2], -1), ([], 1), ([], 0), ([1, -2, 3], 2)]
    wrong += [([1, bad], stages) for bad in (math.nan, math.inf, -math.inf) for stages in (1, 2)]
    wrong += [([math.nan, 1, 2], 2), ([-1e-9], 1)]

    def body(ctx):
        return [refusal(impl.partition, costs, stages) for costs, stages in wrong]

    expect_refused(run(body, 2), [f"partition({c}, {s})" for c, s in wrong])


@exercise("2.20", "virtual", asserts="bytes shared parameters dtype")
def test_parameter_costs_count_tied_weights_once(impl, run, seed):
    """Bytes per layer; the tied embedding counts in the first layer only."""

    def body(ctx):
        models = gpt(seed, torch.float32), gpt(seed, torch.float64), gpt(seed, torch.bfloat16)
        models[2].requires_grad_(False)
        layers = [nn.Tanh(), nn.Linear(2, 3).half(), nn.BatchNorm1d(3), nn.Linear(2, 3).double()]
        layers += [layers[1], nn.Sequential(layers[3], layers[3])]
        layers += [nn.Linear(2, 3, device="meta"), nn.Linear(3, 3, device="meta")]  # no memory
        every = [layers_of(model) for model in models]
        return [list(impl.parameter_costs(each)) for each in (*every, layers)]

    *several, odd = run(body, 1)[0]
    for got, size in zip(several, (4, 8, 2), strict=True):
        block = sum(p.numel() for p in gpt(seed).blocks[0].parameters()) * size
        want = [(VOCABULARY + LENGTH) * WIDTH * size, *[block] * BLOCKS, 2 * WIDTH * size]
        cause = "tied-twice" if sum(got) == sum(want) + VOCABULARY * WIDTH * size else "wrong"
        what = "bytes of embedding, blocks and head, which shares the embedding's weight"
        expect_equal(got, want, what=what, cause=cause)
    what = "bytes of a Tanh, 9 float16, 6 float32, 9 float64 numbers, and of two layers again"
    expect_equal(odd[:6], [0, 18, 24, 72, 0, 0], what=what, cause="bytes")
    what = "bytes of two different layers, of 9 and 12 float32 numbers, on the meta device"
    expect_equal(odd[6:], [36, 48], what=what, cause="told-apart")


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
    """A layer that takes known times; slow in its first call, and disturbed later on."""

    def __init__(self, calls: Counter, name: int, forward: float, backward: float) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)
        self.seconds = forward, backward

        def slowness() -> float:
            calls[name] += 1
            return {1: 50.0, 2: 0.5, 3: 9.0, 5: 0.7, 6: 3.0}.get(calls[name], 1.0)

        self.slowness = slowness  # copies of the layer share it

    def forward(self, x):
        slow = self.slowness()
        y = F.dropout(self.norm(x * self.scale), 0.1)
        return Busy.apply(y, *(s * slow for s in self.seconds))


TIMES = [(0.002, 0.003), (0.005, 0.010), (0.001, 0.004)]


@exercise(
    "2.20",
    "virtual",
    asserts="seconds median chained same-numbers first-measures no-trace one-broadcast cost "
    "resources alone",
)
def test_measured_costs_are_one_ranks_medians(impl, run, seed):
    """Forward and backward, the median after a warm-up, rank 0's numbers for all, no trace left."""

    def body(ctx):
        calls = Counter()
        times = [(a * (1 + ctx.rank), b * (1 + ctx.rank)) for a, b in TIMES]
        layers = [Sleepy(calls, k, *seconds) for k, seconds in enumerate(times)]
        for layer in layers:
            layer.scale.grad = torch.ones(4)
        for layer in layers[:2]:  # what comes in needs a gradient all the same
            layer.requires_grad_(False)

        def state():
            held = [t.clone() for n in layers for t in (*n.parameters(), *n.buffers())]
            grads = [n.scale.grad.clone() for n in layers]
            return [t.detach() for t in (*held, *grads, torch.get_rng_state())]

        example = torch.rand(8, 4)
        held = example.clone()
        before = state()
        got = impl.measured_costs(layers, example, repeats=5)
        return (
            list(got),
            before,
            state(),
            dict(calls),
            bool(torch.equal(example, held) and not example.requires_grad and example.grad is None),
        )

    results = run(body, 3)
    for log in results.logs:
        log.all_waited()
        log.sent_at_most(3 * 8 + 200, "one broadcast of 8 bytes per layer")
        if len(log.events) > 3:
            text = f"rank {log.rank} issued {len(log.events)} collectives, one is enough"
            fail(text, cause="too-many-messages", rank=log.rank)
    want = [forward + backward for forward, backward in TIMES]
    if len({tuple(got) for got, *_ in results}) > 1:
        text = f"the ranks return different costs and would cut apart: {[g for g, *_ in results]}"
        fail(text, cause="ranks-differ")
    for rank, (got, before, after, *_) in enumerate(results):
        causes = {"forward-only": [a for a, _ in TIMES], "": want}
        found = [c for c, w in causes.items() if max(map(abs, map(float.__sub__, got, w))) < 1e-4]
        if "" not in found:
            text = f"costs of layers that take {want} s (rank 0's medians): got {got}"
            fail(text, cause=found[0] if found else "not-the-median", rank=rank)
        what = "weights, buffers, gradients and random state as before"
        same = all(map(torch.equal, before, after))
        expect_equal(same, True, what=what, rank=rank, cause="trace-left")
    for rank, (*_, calls, same) in enumerate(results):
        counts = [6, 6, 6] if rank == 0 else []
        expect_equal(
            sorted(calls.values()), counts, what="runs of each layer", rank=rank, cause="runs"
        )
        expect_equal(same, True, what="the example as before", rank=rank, cause="trace-left")


class Fixed(nn.Module):
    """Layers of all kinds: tokens, frozen ones, none with parameters; each waits for its time."""

    def __init__(self, seconds: float, layer: nn.Module) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, layer

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


class TooMany(Exception):
    """An error of a layer."""


class Shift(nn.Module):
    """Changes its input in place; or can not run."""

    def forward(self, x):
        if len(x) > 4:
            raise TooMany("samples")
        return x.add_(1)


@exercise(
    "2.20",
    "virtual",
    asserts="group first-measures dtype layout parameters chained no-repeats nobody-waits alone "
    "refusals no-trace",
)
def test_a_subgroup_measures_for_itself(impl, run):
    """The first rank of the group measures for all; if it can't, no rank waits for it."""

    def body(ctx):
        ours, theirs = dist.new_group([3, 1]), dist.new_group([0, 2])
        group = ours if ctx.rank in (1, 3) else theirs
        kinds = [nn.Embedding(5, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 2)]
        kinds = [kind.requires_grad_(False) for kind in kinds]
        layers = [Fixed(0.01 * (k + 1 + 4 * ctx.rank), kind) for k, kind in enumerate(kinds)]
        tokens = torch.tensor([[0, 3], [4, 1], [2, 2]]).T
        got = list(impl.measured_costs(layers, tokens, repeats=3, group=group))
        measure = impl.measured_costs
        again = [refusal(measure, layers, tokens, repeats=n, group=group) for n in (0, -1)]
        kept = []
        for example in (tokens, torch.ones(3, 4)):
            impl.measured_costs([Shift(), nn.ReLU(True)], example, repeats=1, group=group)
            kept.append(example.tolist())
        example = torch.ones(3, 4, requires_grad=True)
        impl.measured_costs([nn.Linear(4, 2), nn.Tanh()], example, repeats=1, group=group)
        kept.append(example.grad)
        try:
            impl.measured_costs([nn.ReLU(), Shift()], torch.ones(5, 4), repeats=1, group=group)
            failed = "nothing"
        except Exception as error:
            failed = type(error).__name__
        return got, again, kept, failed

    results = run(body, 4)
    for first, second in ((1, 3), (0, 2)):
        want = [0.01 * (k + 1 + 4 * first) for k in range(4)]
        for rank in (first, second):
            got = results[rank][0]
            close = len(got) == 4 and all(abs(a - b) < 1e-4 for a, b in zip(got, want, strict=True))
            if not close:
                text = f"group of ranks {first} and {second}: rank {first}'s layers take {want} s"
                cause = "wrong-rank" if any(got) else "not-measured"
                fail(f"{text}, rank {rank} got {got}", cause=cause, rank=rank)
    for rank, (_, again, kept, failed) in enumerate(results):
        expect_refusals(again, ["repeats=0", "repeats=-1"], rank=rank)
        held = [[[0, 4, 2], [3, 1, 2]], [[1.0] * 4] * 3, None]
        what = "examples of layers that work in place, and the gradient of one that needs it"
        expect_equal(kept, held, what=what, rank=rank, cause="trace-left")
        want = "TooMany" if rank in (0, 1) else "RuntimeError"
        what = "raised when a layer fails with an error of its own"
        expect_equal(failed, want, what=what, rank=rank, cause="error-lost")


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
