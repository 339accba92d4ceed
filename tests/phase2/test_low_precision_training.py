"""Checks of exercise 2.29: what a layer remembers, masters, memory, and a training."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import digits
from tests.phase2.eight_bits import DELAYED, E4M3, INNER, OUTER, in_tensor, linear, scale_of
from tests.phase2.half_precision import seeded
from tests.phase2.parallel_values import values

NAN = math.nan


# -- what a layer remembers -----------------------------------------------------------------------
@exercise("2.29", "virtual cuda", asserts="remembered evaluation first-scale life saturated")
def test_amax_over_several_passes(impl, run, seed):
    """The largest |x| since the last update; evaluation leaves it; old scales until the update."""

    def tensors():
        factors = (1.0, 5.0, 0.3)
        return [
            (values(seed, 30 + i, 4, INNER).float() * f, values(seed, 40 + i, 4, OUTER).float() * f)
            for i, f in enumerate(factors)
        ]

    def body(ctx):
        layer = impl.Float8Linear(linear(seed), history=2).to(ctx.device)
        passes = [(x.to(ctx.device).requires_grad_(), g.to(ctx.device)) for x, g in tensors()]

        def run_all():
            for x, g in passes:
                layer(x).backward(g)
            return layer.amax_T.cpu().clone()

        seen, fresh = [run_all()], layer.scale_T.cpu().clone()
        impl.update_scales(layer)
        known, empty = layer.scale_T.cpu().clone(), layer.amax_T.cpu().clone()
        layer.eval()
        layer(passes[1][0] * 100).backward(passes[1][1])
        seen.append(layer.amax_T.cpu().clone())
        layer.train()
        with torch.no_grad():
            layer.weight *= 100
            clipped = layer(passes[0][0]).detach().cpu()
        layer(torch.full((1, INNER), NAN, device=ctx.device))
        seen.append(layer.amax_T.cpu().clone())
        y = layer(passes[0][0])
        impl.update_scales(layer)
        y.sum().backward()  # begun before the update
        return seen, fresh, known, empty, clipped

    seen, fresh, known, empty, clipped = run(body, 1)[0]
    layer = linear(seed)
    x, g = (max(t[i].abs().max().item() for t in tensors()) for i in range(2))
    most = [x, layer.weight.abs().max().item(), g]
    what = "amax_T after three passes"
    expect_equal(seen[0].tolist(), most, what=what, cause="wrong-amax")
    expect_equal(fresh.tolist(), [0.0] * 3, what="scale_T before an update", cause="wrong-scale")
    want = [scale_of(m, d) for m, d in zip(most, DELAYED, strict=True)]
    expect_equal(known.tolist(), want, what="scale_T after it", cause="wrong-scale")
    expect_equal(empty.tolist(), [0.0] * 3, what="amax_T after it", cause="not-cleared")
    what = "amax_T after an evaluation"
    expect_equal(seen[1].tolist(), [0.0] * 3, what=what, cause="evaluation-counts")
    nan = seen[2].isnan().tolist()
    expect_equal(
        nan, [True, False, False], what="whether amax_T tells of a NaN in x", cause="nan-lost"
    )
    x8 = in_tensor(tensors()[0][0], E4M3, want[0])
    w8 = in_tensor(layer.weight.detach() * 100, E4M3, want[1])
    right = (x8 @ w8.T + layer.bias.detach().double()).float()
    what = "y with a weight that outgrew its scale"
    expect_close(clipped, right, what=what, rtol=1e-5, atol=1e-4)


@exercise("2.29", "virtual", asserts="state masters frozen life parameters")
def test_masters_and_state(impl, run, seed):
    """The linear layer's own float32 parameters; scales and history travel in the state_dict."""

    def body(ctx):
        plain = linear(seed)
        layer = impl.Float8Linear(plain, history=4)
        same = layer.weight is plain.weight, layer.bias is plain.bias
        bare = impl.Float8Linear(linear(seed, bias=False))
        blocks = impl.Float8Linear(linear(seed), block=8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        x = values(seed, 50, 4, INNER).float().requires_grad_()
        begun = layer.weight.detach().clone()
        layer(x).sum().backward()
        optimizer.step()
        impl.update_scales(layer)
        moved = (layer.weight.detach() - begun, layer.weight.grad.clone(), layer.weight.dtype)
        other = impl.Float8Linear(linear(seed + 1), history=4)
        other.load_state_dict(layer.state_dict())
        equal = torch.equal(other(x * 3), layer(x * 3))
        frozen = impl.Float8Linear(linear(seed).requires_grad_(False))
        y = frozen(x.detach())
        x.grad = None
        frozen(x).sum().backward()
        still = y.requires_grad, frozen.weight.grad, x.grad is not None
        kinds = {n: tuple(t.shape) for n, t in layer.state_dict().items()}
        default = tuple(bare.history_HT.shape)
        none = [blocks.scale_T, blocks.amax_T, blocks.history_HT]
        names = sorted(bare.state_dict()), sorted(blocks.state_dict())
        shape = tuple(bare(x).shape)
        return same, moved, equal, still, kinds, default, none, names, shape

    same, moved, equal, still, kinds, default, none, names, shape = run(body, 1)[0]
    expect_equal(same, (True, True), what="whether weight and bias are the given objects")
    by, grad, dtype = moved
    expect_equal(dtype, torch.float32, what="the master's dtype", cause="dtype")
    off = (by + 1e-6 * grad).abs().max().item()
    if off > 1e-7:
        fail(f"the optimizer's step is lost: {off:g} off", cause="no-master")
    expect_equal(equal, True, what="whether a layer goes on with another's state", cause="state")
    expect_equal(still, (False, None, True), what="a frozen layer", cause="frozen")
    buffers = {"scale_T": (3,), "history_HT": (4, 3)}
    want = {"weight": (OUTER, INNER), "bias": (OUTER,), **buffers}
    expect_equal(kinds, want, what="the state_dict", cause="state")
    expect_equal(default, (16, 3), what="the default history", cause="state")
    expect_equal(none, [None] * 3, what="what a layer with blocks remembers", cause="state")
    want = (["history_HT", "scale_T", "weight"], ["bias", "weight"])
    expect_equal(names, want, what="the states without bias, and with blocks", cause="state")
    expect_equal(shape, (4, OUTER), what="y without a bias", cause="shape")


@exercise("2.29", "virtual cuda", asserts="kept resources")
def test_one_byte_per_element_stays(impl, run, seed):
    """Between forward and backward: x and weight in 8 bits, y, and the inverse scales."""
    inner = 96
    cases = (None, 64, 32), (32, 64, 32), (32, 33, 3)  # blocks of 32 divide neither 33 nor 3

    def body(ctx):
        left = []
        for block, rows, outer in cases:
            layer = impl.Float8Linear(linear(seed, inner, outer), block=block).to(ctx.device)
            x = torch.ones(rows, inner, device=ctx.device, requires_grad=True)
            with PeakMemory() as memory:
                y = layer(x)
                held = memory.current
                y.sum().backward()
                del y
                grads = sum(p.grad.nbytes for p in (x, layer.weight, layer.bias))
                left.append((held, memory.current - grads))
        return left

    for rank, left in enumerate(run(body, 1)):
        for (block, rows, outer), (held, after) in zip(cases, left, strict=True):
            numbers = (rows + outer) * inner
            counts = [1, 1] if block is None else [inner * -(-n // block) for n in (rows, outer)]
            most = 4 * rows * outer + numbers + 4 * sum(counts) + 256
            what = f"block {block}, x {(rows, inner)}, weight {(outer, inner)}"
            if held > most:
                text = f"{what}: {held} bytes are alive after forward; y, 8-bit x and weight, and "
                text += f"scales have {most}"
                text += "; a slice keeps the whole tensor" if rows % (block or 1) else ""
                fail(text, cause="too-much-memory", rank=rank)
            if after > 256:
                text = f"{what}: {after} bytes are alive after backward"
                fail(text, cause="too-much-memory", rank=rank)


@exercise("2.29", "virtual", asserts="refusals")
def test_low_precision_refuses_bad_input(impl, run, seed):
    """Other formats, blocks, histories, masters and widths, and a rank outside of the group."""

    def body(ctx):
        group = dist.new_group([0])
        plain, half = linear(seed), linear(seed).bfloat16()
        layer = impl.Float8Linear(plain)
        found = [
            refusal(impl.saturate, torch.ones(2), torch.float16),
            refusal(impl.quantise_blocks, torch.ones(2, 2), 0, E4M3),
            refusal(impl.Float8Linear, half),
            refusal(impl.Float8Linear, plain, block=0),
            refusal(impl.Float8Linear, plain, history=0),
            refusal(impl.Float8Linear, plain, margin=-1),
            refusal(layer, torch.ones(2, INNER + 1)),
        ]
        return [*found, refusal(impl.update_scales, layer, group) if ctx.rank else found[0]]

    calls = ["float16", "a block of 0", "masters of bfloat16", "block=0", "history=0", "margin=-1"]
    expect_refused(run(body, 2), [*calls, "x of another width", "a rank outside of the group"])


# -- a training -----------------------------------------------------------------------------------
def losses(make, after, dtype=None) -> list[float]:
    """Loss over all digits after 15 steps, for three seeds; ``make`` gives each layer."""
    images, targets = digits().tensors
    images, found = images.flatten(1), []
    for number in range(3):
        layers = [linear(10 * number + i, *n) for i, n in enumerate(((64, 256), (256, 10)))]
        model = nn.Sequential(make(layers[0]), nn.ReLU(), make(layers[1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(rows, model=model):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                return F.cross_entropy(model(images[rows]).float(), targets[rows])

        order = seeded(number, lambda: torch.randperm(1280)).view(10, 128)
        for step in range(15):
            optimizer.zero_grad()
            loss(order[step % 10]).backward()
            after(model)
            optimizer.step()
        with torch.no_grad():
            found.append(loss(slice(None)).item())
    return found


@exercise("2.29", "virtual", asserts="trains")
def test_a_training_ends_as_with_bfloat16(impl, run):
    """Digits: the mean loss of three seeds after 15 steps is within 1 % of that of bfloat16."""

    def body(ctx):
        delayed = losses(impl.Float8Linear, impl.update_scales)
        blocks = losses(lambda layer: impl.Float8Linear(layer, block=32), impl.update_scales)
        return delayed, blocks

    want = sum(losses(lambda layer: layer, lambda model: None, torch.bfloat16)) / 3
    results = run(body, 1, timeout=60)[0]
    for found, name in zip(results, ("delayed scaling", "blocks of 32"), strict=True):
        got = sum(found) / 3
        if not abs(got / want - 1) < 0.01:
            fail(f"{name}: the loss is {got:.4f}, with bfloat16 {want:.4f}", cause="trains-worse")


@trace("2.29")
def trace_low_precision(impl):
    """Three steps of two layers with delayed scaling, and the all-reduce of their amaxes."""

    def body(ctx):
        layers = [impl.Float8Linear(linear(i, 256, 256)) for i in range(2)]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        x = values(0, ctx.rank, 256, 256).float()
        for step in ctx.steps(4):
            with ctx.region(f"step {step}"):
                model(x).square().mean().backward()
                impl.update_scales(model)

    return body
