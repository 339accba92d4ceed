"""Checks of exercise 2.7: savings and costs of checkpointing, layer after layer, on W ranks."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_same_sequence,
    fail,
    refusal,
    trace,
)
from distlab.observe.log import readable
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import Block, digits

ROWS, WIDTH = 1024, 32
A = ROWS * WIDTH * 4  # bytes of a layer's input
L = 9 * A  # what a Wide layer saves: its input, and the hidden values before and after GELU
SMALL = 100_000
GRADIENTS = 35_000  # bytes of a layer's


class Wide(nn.Sequential):
    """One layer: four times wider inside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def seeded(seed: int, count: int, make=Wide) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [make() for _ in range(count)]


def cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


class AllReduce(torch.autograd.Function):
    """The sum over the ranks in forward, as tensor parallelism needs it."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


# -- 2.7 ------------------------------------------------------------------------------------------
@exercise("2.7", "gloo", asserts="keeps-nothing resources")
def test_a_segment_holds_its_input_only(impl, run, seed):
    """After forward, of a segment of four layers only the input is alive, not even the output."""

    def held_after_forward(call):
        layers = nn.Sequential(*seeded(seed, 4))
        start = torch.randn(ROWS, WIDTH, requires_grad=True)
        with PeakMemory() as memory:
            loss = call(layers, start * 2).sum()
            held = memory.current
        loss.backward()
        return held

    def body(ctx):
        return held_after_forward(impl.checkpoint)

    (held,) = run(body, 1, process_group=False, ledger=False)
    if held > A + SMALL:
        without = held_after_forward(lambda fn, x: fn(x))
        fail(
            f"after forward a segment of 4 layers holds {readable(held)}, its input alone is "
            f"{readable(A)} (without checkpointing {readable(without)})",
            cause="activations-kept",
        )


@exercise("2.7", "gloo", asserts="held peak resources")
def test_segments_hold_what_the_formula_says(impl, run, seed):
    """(s-1)·A + n/s·L bytes after forward, and hardly more at the peak of backward."""
    shapes = ((16, 4), (9, 2), (6, 6), (4, 1))

    def body(ctx):
        found = []
        for count, segments in shapes:
            layers = seeded(seed, count)
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with PeakMemory() as memory:
                loss = impl.checkpoint_sequential(layers, segments, x).sum()
                held = memory.current
                loss.backward()
            found.append([held, memory.peak])
        return found

    found = run(body, 1, process_group=False, ledger=False)[0]
    for (n, s), (held, peak) in zip(shapes, found, strict=True):
        what = f"{n} layers in {s} segments"
        bound = (s - 1) * A + n // s * L + SMALL
        if held > bound:
            fail(
                f"{what}: {readable(held)} are held after forward, expected (s-1)·A + ⌊n/s⌋·L = "
                f"{readable((s - 1) * A + n // s * L)} (without checkpointing {readable(n * L)})",
                cause="too-much-held",
            )
        bound = (s - 1) * A + -(-n // s) * L + L + n * GRADIENTS
        if peak > bound:
            fail(
                f"{what}: {readable(peak)} at the peak of backward, expected about (s-1)·A + "
                f"⌈n/s⌉·L = {readable((s - 1) * A + -(-n // s) * L)}: a segment's activations "
                "must go before the next is computed again",
                cause="peak",
            )


@exercise("2.7", "virtual cuda", asserts="segments equal-plain computed cost")
def test_segments_compute_what_the_formula_says(impl, run, seed, cases):
    """2n - ⌊n/s⌋ layers are computed: the last segment once. Values are those of the layers."""
    shapes = list(cases((7, 3), (6, 6), (5, 1), (1, 1), (8, 4)))

    def inputs(count, device="cpu"):
        make = lambda: nn.Linear(4, 4, dtype=torch.float64)
        x = torch.ones(2, 4, dtype=torch.float64, device=device)
        return nn.Sequential(*seeded(seed, count, make)).to(device), x

    def count_calls(ctx, count, segments):
        layers, x = inputs(count, ctx.device)
        calls = [0] * count
        for number, each in enumerate(layers):
            each.register_forward_pre_hook(
                lambda *_, number=number: calls.__setitem__(number, calls[number] + 1)
            )
        out = impl.checkpoint_sequential(layers, segments, x)
        now = list(calls)
        out.square().sum().backward()
        then = list(calls)
        return now, then, [out.detach().cpu(), *(cpu(p.grad) for p in layers.parameters())]

    def body(ctx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Embedding(5, 4).to(ctx.device), nn.Tanh(), nn.Linear(4, 4).to(ctx.device)]
        tokens = torch.tensor([3, 1, 3], device=ctx.device)  # which can not need a gradient
        impl.checkpoint_sequential(layers, 2, tokens).sum().backward()
        return [count_calls(ctx, *shape) for shape in shapes], cpu(layers[0].weight.grad)

    ((found, of_tokens),) = run(body, 1, process_group=False)
    rows = None if of_tokens is None else of_tokens.any(1).tolist()
    what = "rows of an embedding, the first layer, that have got a gradient by the tokens 3, 1, 3"
    expect_equal(rows, [False, True, False, True, False], what=what, cause="no-gradient")
    for (count, segments), (now, then, got) in zip(shapes, found, strict=True):
        what = f"{count} layers in {segments} segments"
        layers, x = inputs(count)
        value = layers(x)
        value.square().sum().backward()
        want = [value.detach(), *(p.grad for p in layers.parameters())]
        for ours, right in zip(got, want, strict=True):
            expect_close(ours, right, what=f"{what}: output or gradient", rtol=1e-9, atol=1e-9)
        ones = [1] * count
        expect_equal(now, ones, what=f"{what}: calls in forward", cause="forward-twice")
        last = count // segments
        expect_equal(
            then,
            [2] * (count - last) + [1] * last,
            what=f"{what}: calls of each layer after backward, {2 * count - last} in all",
            cause="evaluations",
        )


@exercise("2.7", "virtual", asserts="refused refusals")
def test_impossible_cuts_are_refused(impl, run):
    """No segment, or more segments than layers: ValueError before any layer runs."""
    cuts = ((3, 0), (3, 4), (3, -1), (0, 1))

    def body(ctx):
        ran = []

        def layer(x):
            ran.append(1)
            return x

        x = torch.ones(2)
        every = [refusal(impl.checkpoint_sequential, [layer] * n, s, x) for n, s in cuts]
        return every, len(ran)

    refused, ran = run(body, 1, process_group=False)[0]
    expect_refusals(refused, [f"{count} layers in {segments} segments" for count, segments in cuts])
    expect_equal(ran, 0, what="layers that ran before a refusal", cause="late-check")


@exercise("2.7", "virtual gloo", asserts="own-state gradients random alone cost")
def test_collectives_in_a_segment(impl, run, seed, cases):
    """Ranks that communicate within segments communicate again in backward,
    each with its own dropout."""
    for world_size in cases(3, 2):

        def scenario(ctx, checkpoint):
            first, second = seeded(seed, 2, lambda: nn.Linear(4, 4, dtype=torch.float64))
            generator = ctx.generator()
            x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
            torch.manual_seed(seed + ctx.rank)

            def fn(layer, x):
                return AllReduce.apply(torch.dropout(torch.tanh(layer(x)), 0.5, True))

            out = checkpoint(fn, first, x)
            out = checkpoint(fn, second, out)
            out.square().sum().backward()
            return [t.grad for t in (x, first.weight, second.weight)], torch.rand(2)

        def body(ctx):
            with ctx.region("checkpointed"):
                return scenario(ctx, impl.checkpoint)

        def reference(ctx):
            return scenario(ctx, lambda fn, *args: fn(*args))

        results, plain = run(body, world_size), run(reference, world_size)
        pairs = zip(plain, results, strict=True)
        for rank, ((want, wanted), (got, next_)) in enumerate(pairs):
            for name, ours, right in zip(("x", "first", "second"), got, want, strict=True):
                what = f"{world_size} ranks: gradient of {name}"
                expect_close(ours, right, what=what, rank=rank, rtol=1e-9, atol=1e-9)
            expect_equal(
                next_.tolist(),
                wanted.tolist(),
                what="the next random numbers",
                rank=rank,
                cause="random-outside",
            )
        logs = [log.select(region="checkpointed") for log in results.logs]
        expect_same_sequence(logs)
        for log in logs:
            if log.messages > 4:
                fail(
                    f"{world_size} ranks: rank {log.rank} issued {log.messages} all-reduces, "
                    "expected 2 in forward and at most 2 when backward computes again",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@trace("2.7")
def trace_segments(impl):
    """Steps of six transformer blocks in three segments, gradients all-reduced at the end."""
    digits()

    def body(ctx):
        images, _ = digits()[ctx.rank :: ctx.world_size]
        layers = seeded(0, 6, lambda: Block(64, 4))
        parameters = [p for each in layers for p in each.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        for step in ctx.steps(3):
            x_BTD = images[32 * step : 32 * step + 32].flatten(1).unflatten(1, (1, 64))
            impl.checkpoint_sequential(layers, 3, x_BTD).square().mean().backward()
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            optimizer.step()
            optimizer.zero_grad()

    return body
