"""Checks of exercise 2.27: what is kept, what runs again, and ranks that communicate in a call."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_same_sequence,
    fail,
    trace,
)
from distlab.observe.log import readable
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import Block, digits
from tests.phase2.chosen import (
    F64,
    PRODUCTS,
    Counting,
    Layer,
    drawn,
    everything,
    nothing,
    these,
)

ROWS, SIDE = 512, 32
A = ROWS * SIDE * 4  # bytes of an input
SMALL = 20_000  # a random state takes 5 kB, and there are small tensors
DEPTH = 3
HELD = {"nothing": A, "products": A + DEPTH * 4 * A + (DEPTH - 1) * A}
NAMES = ("the gradient of x", "the gradient of w", "random numbers after backward")
KEEPS = {"nothing": nothing, "products": these(*PRODUCTS)}


def deep(seed: int) -> nn.Sequential:
    """Layers four times wider inside: without a choice each saves its input and 2·4A."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = [
            (nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Linear(4 * SIDE, SIDE)) for _ in range(DEPTH)
        ]
    return nn.Sequential(*(each for layer in wide for each in layer))


def measured(call: Any, seed: int, keep: Any) -> list[int]:
    """Bytes after forward, when backward comes to the first layer, at its peak, and in the end:
    of a call with its backward, and of one without."""
    layers = deep(seed)
    for p in layers.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(ROWS, SIDE, requires_grad=True)
    late: list[int] = []
    memory = PeakMemory()

    def fn(x: Tensor) -> Tensor:
        h = layers[:3](x)
        h.register_hook(lambda grad: late.append(memory.current))
        return layers[3:](h)

    with memory:
        loss = call(keep, fn, x * 2).sum()
        held = memory.current
        loss.backward()
        peak = memory.peak
        del loss
        x.grad = None
        after = memory.current
        gc.disable()
        try:
            loss = call(keep, fn, x * 2).sum()
            del loss
            left = memory.current
        finally:
            gc.enable()
    return [held, late[0], peak, after, left]


class AllReduce(torch.autograd.Function):
    """The sum over the ranks in forward, as tensor parallelism needs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# -- 2.27 -----------------------------------------------------------------------------------------
@exercise("2.27", "gloo", asserts="held freed resources")
def test_inputs_and_chosen_outputs_are_held(impl, run, seed):
    """A + K bytes after forward; backward never needs more than without; nothing stays."""

    def body(ctx):
        return [measured(impl.selective_checkpoint, seed, keep) for keep in KEEPS.values()]

    (found,) = run(body, 1, process_group=False, ledger=False)
    most = measured(lambda keep, fn, x: fn(x), seed, None)
    for (name, bound), (held, late, peak, after, left) in zip(HELD.items(), found, strict=True):
        if held > bound + SMALL:
            fail(
                f"{name} kept: {readable(held)} are held after forward, expected A + K = "
                f"{readable(bound)} (without recomputation {readable(most[0])})",
                cause="too-much-held",
            )
        if held < bound - SMALL:
            fail(
                f"{name} kept: only {readable(held)} are held after forward, the inputs and the "
                f"kept outputs are {readable(bound)}",
                cause="not-kept",
            )
        for got, want, when in ((late, most[1], "in its first layer"), (peak, most[2], "at most")):
            if got > want + SMALL:
                fail(
                    f"{name} kept: backward holds {readable(got)} {when}, a plain call "
                    f"{readable(want)}: let go of what backward has used",
                    cause="not-freed",
                )
        if after > SMALL or left > SMALL:
            fail(
                f"{name} kept: {readable(max(after, left))} are still held when the output is gone "
                f"{'after' if after > SMALL else 'without'} a backward",
                cause="circle",
            )


@exercise("2.27", "virtual", asserts="again second cost")
def test_only_the_others_run_again(impl, run, seed):
    """A kept operator runs once, the others twice, up to the last tensor that backward needs."""
    norm, soft, product = "aten.native_layer_norm.default", "aten._softmax.default", PRODUCTS[1]
    end = "aten.sign.default"
    names = (norm, product, "aten.relu.default", soft, "aten.exp.default", end)
    kept = {"nothing": (), "products": (product,), "norm and softmax": (norm, soft)}

    def body(ctx):
        found = []
        for chosen in kept.values():
            layer, x = Layer(seed), drawn(seed + 20, 4, 8, grad=True)

            def fn(x, layer=layer):
                h = torch.exp(layer(x).mul_(2))  # the write lets go of no product
                return h, torch.sign(h.detach())

            with Counting() as counting:
                out, _ = impl.selective_checkpoint(these(*chosen), fn, x)
                counts = [[counting.names[name] for name in names]]
                for _ in range(2):
                    out.sum().backward(retain_graph=True)
                    counts.append([counting.names[name] for name in names])
            found.append(counts)
        return found

    (found,) = run(body, 1, process_group=False)
    once = [1, 3, 1, 1, 1, 1]  # one product with a weight in the attention, two in the MLP
    for (name, chosen), (forward, first, second) in zip(kept.items(), found, strict=True):
        what = f"{name} kept: how often {', '.join(n.split('.')[1] for n in names)} ran"
        expect_equal(forward, once, what=f"{what} in forward", cause="forward-twice")
        again = [0 if n in chosen or n == end else k for n, k in zip(names, once, strict=True)]
        want = [a + b for a, b in zip(once, again, strict=True)]
        expect_equal(first, want, what=f"{what} after backward", cause="runs-again")
        want = [a + (0 if n == end else k) for a, k, n in zip(want, once, names, strict=True)]
        expect_equal(second, want, what=f"{what} after two backwards", cause="second-backward")


def communicating(ctx: Any, seed: int, call: Any, keep: Any) -> list[Tensor]:
    """Two calls, each with dropout and two all-reduces, and their backward."""
    w = drawn(seed, 4, 4, grad=True)
    # dropout leaves some rows without a gradient; if one row of few has one, a wrong gradient is
    # a multiple of the right one
    x = torch.randn(8, 4, generator=ctx.generator(), dtype=F64, requires_grad=True)
    torch.manual_seed(seed + ctx.rank)

    def fn(x: Tensor) -> Tensor:
        inner = torch.tanh(AllReduce.apply(x) @ w)
        return torch.sin(AllReduce.apply(torch.dropout(inner, 0.5, True)))

    call(keep, fn, call(keep, fn, x)).square().sum().backward()
    return [x.grad, w.grad, torch.rand(2)]


def expect_plain(results: Any, plain: Any) -> None:
    """On every rank gradients and random numbers are those of the plain call."""
    for rank, (got, want) in enumerate(zip(results, plain, strict=True)):
        for name, ours, right in zip(NAMES, got, want, strict=True):
            expect_close(ours, right, what=name, rank=rank, rtol=1e-9)


@exercise("2.27", "virtual gloo", asserts="outputs random")
def test_collectives_in_a_call(impl, run, seed):
    """Ranks that communicate in a call do so again in backward, each with its own dropout."""
    keep = these("aten.mm.default")

    def body(ctx):
        with ctx.region("recomputed"):
            return communicating(ctx, seed, impl.selective_checkpoint, keep)

    def reference(ctx):
        return communicating(ctx, seed, lambda keep, fn, x: fn(x), keep)

    results = run(body, 3)
    expect_plain(results, run(reference, 3))
    logs = [log.select(region="recomputed") for log in results.logs]
    expect_same_sequence(logs)
    for log in logs:
        expect_equal(
            log.messages,
            8,
            what="all-reduces of two calls, in forward and again in backward",
            rank=log.rank,
            cause="messages",
        )


@exercise("2.27", "gloo", asserts="written")
def test_a_collective_writes_into_a_kept_output(impl, run, seed):
    """What an all-reduce in a call wrote into is computed and reduced again, never given back."""
    # virtual ranks make no c10d operator, so no mode of a rank can see what one writes there

    def body(ctx):
        return communicating(ctx, seed, impl.selective_checkpoint, everything)

    def reference(ctx):
        return communicating(ctx, seed, lambda keep, fn, x: fn(x), everything)

    expect_plain(run(body, 2), run(reference, 2))


@trace("2.27")
def trace_chosen(impl):
    """Steps of six transformer blocks that keep products; gradients all-reduced at the end."""
    digits()

    def body(ctx):
        images, _ = digits()[ctx.rank :: ctx.world_size]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.ModuleList(Block(64, 4) for _ in range(6))
        parameters = [*layers.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        for step in ctx.steps(3):
            x_BTD = images[32 * step : 32 * step + 32].flatten(1).unflatten(1, (1, 64))
            for layer in layers:
                x_BTD = impl.selective_checkpoint(impl.at_least(16), layer, x_BTD)
            x_BTD.square().mean().backward()
            flat = torch.cat([p.grad.flatten() for p in parameters])
            dist.all_reduce(flat)
            optimizer.step()
            optimizer.zero_grad()

    return body
