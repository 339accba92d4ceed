"""Checks of exercise 2.28: messages, dtypes, layouts, and what is kept."""

from __future__ import annotations

import torch

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    fail,
)
from tests.phase2.batch_norms import (
    CHANNELS,
    EXACT,
    OneProcess,
    given_to,
    input_of,
    rows_of,
    running_of,
)
from tests.phase2.parallel_values import values


@exercise("2.28", "virtual gloo cuda", nccl=True, asserts="cost no-rows-sends needs-none")
def test_one_message_each_way(impl, run, seed):
    """8·(2C + 1) bytes forward and 2·C numbers backward; none backward if x needs no gradient."""
    kinds = {"float64": (torch.float64, 8), "float32": (torch.float32, 4)}

    def body(ctx):
        for name, (dtype, _) in kinds.items():
            for needs in (True, False):
                layer = impl.SyncBatchNorm(CHANNELS).to(ctx.device, dtype)
                x = input_of(seed, ctx.rank, rows_of(ctx.rank, 3), 2).to(ctx.device, dtype)
                with ctx.region(f"forward {name} {needs}"):
                    y = layer(x.requires_grad_(needs))
                with ctx.region(f"backward {name} {needs}"):
                    y.sum().backward()
        with torch.no_grad(), ctx.region("forward without graph"):
            layer(x)

    forward = [("all_reduce", 8 * (2 * CHANNELS + 1))]
    for rank, log in enumerate(run(body, 3).logs):
        wanted = {"forward without graph": forward}
        for name, (_, size) in kinds.items():
            for needs in (True, False):
                wanted[f"forward {name} {needs}"] = forward
                backward = [("all_reduce", size * 2 * CHANNELS)]
                wanted[f"backward {name} {needs}"] = backward if needs else []
        for region, want in wanted.items():
            found = [(event.op, event.payload) for event in log.select(region=region).events]
            what = f"{region} (whether x needs a gradient): operators and bytes"
            expect_equal(found, want, what=what, rank=rank, cause="cost")
        log.all_waited()


@exercise("2.28", "nccl", asserts="host")
def test_layer_never_waits_for_the_gpu(impl, run, seed):
    """Neither the count nor the running average is read by the host."""

    def body(ctx):
        layers = [impl.SyncBatchNorm(4, momentum=m).to(ctx.device) for m in (None, 0.1)]
        x = input_of(seed, ctx.rank, 3, channels=4).float().to(ctx.device).requires_grad_()
        for region in ("first", "step"):
            with ctx.region(region):
                for layer in layers:
                    layer(x).sum().backward()

    expect_few_waits(run(body, 3), 0, "two layers, forward and backward", copies=False)


@exercise("2.28", "virtual cuda", asserts="half dtype")
def test_inputs_in_sixteen_bits(impl, run, seed):
    """Output and gradient in the input's dtype, rounded once; statistics in float32."""
    dtypes = (torch.bfloat16, torch.float16)

    def drawn(rank, dtype):
        return (input_of(seed, rank, 40, 2) / 8).to(dtype)

    def body(ctx):
        out = []
        for dtype in dtypes:
            layer = given_to(impl.SyncBatchNorm(CHANNELS), seed).to(ctx.device)
            x = drawn(ctx.rank, dtype).to(ctx.device).requires_grad_()
            y = layer(x)
            y.backward(torch.ones_like(y) * x.detach().cos())
            grads = [p.grad.cpu() for p in layer.parameters()]
            narrow = given_to(impl.SyncBatchNorm(CHANNELS), seed).to(ctx.device, dtype)
            low = narrow(x.detach().requires_grad_())
            low.sum().backward()
            kinds = [low.dtype, narrow.running_var.dtype, narrow.weight.grad.dtype]
            out.append((y.detach().cpu(), x.grad.cpu(), grads, running_of(layer), kinds))
        return out

    for rank, result in enumerate(run(body, 2)):
        for dtype, (y, grad, grads, running, kinds) in zip(dtypes, result, strict=True):
            xs = [drawn(r, dtype) for r in (0, 1)]
            one = OneProcess(seed)
            ys, of_x = one(xs, [x.cos() for x in xs])
            place = f"{dtype} input: "
            unit = torch.finfo(dtype).eps / 2
            for got, want, what in ((y, ys[rank], "output"), (grad, of_x[rank], "gradient of x")):
                kind = got.dtype
                expect_equal(kind, dtype, what=f"{place}dtype of the {what}", cause="dtype")
                off = (got.double() - want).abs() - 1.02 * unit * want.abs() - 1e-5
                if what == "gradient of x":
                    off = off - unit * want.abs()
                if (off > 0).any():
                    text = f"{place}{int((off > 0).sum())} elements of the {what} are further from "
                    text += "the exact value than one rounding: compute in float32, round once"
                    fail(text, cause="rounded-often", rank=rank)
            close = {"rtol": 1e-5, "atol": 1e-5}
            for name, want in one.running().items():
                same = running[name].double() if want.is_floating_point() else running[name]
                expect_close(same, want, what=f"{place}{name}", rank=rank, **close)
            for got in grads:
                expect_equal(got.dtype, torch.float32, what=f"{place}dtype of a parameter's grad")
            what = f"a layer in {dtype}: dtypes of output, running variance, weight's gradient"
            expect_equal(kinds, [dtype] * 3, what=what, rank=rank, cause="dtype")


@exercise("2.28", "virtual", asserts="layout same gradients")
def test_any_layout_in_memory(impl, run, seed):
    """Channels-last stays; strided inputs and expanded or strided gradients are read rightly."""

    def body(ctx):
        plain = input_of(seed, ctx.rank, 4, 3, 2)
        kinds = {
            "contiguous": plain.clone(),
            "channels last": plain.clone(memory_format=torch.channels_last),
            "every second row": plain.repeat_interleave(2, 0)[::2],
            "transposed": plain.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        }
        out = {}
        for name, x in kinds.items():
            layer = given_to(impl.SyncBatchNorm(CHANNELS).double(), seed)
            x = x.detach().requires_grad_()
            y = layer(x)
            weights = values(seed, ctx.rank, 4, 3, 2, CHANNELS).permute(0, 3, 1, 2)
            y.backward(weights)
            first, x.grad = x.grad, None
            layer(x)[:, :, 0].sum().backward()
            out[name] = y.detach(), first, x.grad, y.stride() == x.stride()
        return out

    results = run(body, 2)
    xs = [input_of(seed, rank, 4, 3, 2) for rank in range(2)]
    weights = [values(seed, r, 4, 3, 2, CHANNELS).permute(0, 3, 1, 2) for r in range(2)]
    ones = torch.zeros_like(xs[0])
    ones[:, :, 0] = 1
    ys, of_x = OneProcess(seed)(xs, weights)
    _, again = OneProcess(seed)(xs, [ones, ones])
    for rank, found in enumerate(results):
        for name, (y, grad, second, same) in found.items():
            expect_close(y, ys[rank], what=f"{name}: the output", rank=rank, **EXACT)
            expect_close(grad, of_x[rank], what=f"{name}: gradient of x", rank=rank, **EXACT)
            what = f"{name}: gradient of x from a part of the output"
            expect_close(second, again[rank], what=what, rank=rank, **EXACT)
            if name != "every second row":
                what = f"{name}: whether the output is laid out in memory as the input"
                expect_equal(same, True, what=what, rank=rank, cause="layout")


@exercise("2.28", "virtual", asserts="parameters gradients options")
def test_frozen_and_absent_parameters(impl, run, seed):
    """Frozen parameters get no gradient and keep stale ones; eps and affine=False count."""
    settings = ({"affine": False}, {"eps": 0.5}, {"track_running_stats": False})

    def body(ctx):
        x = input_of(seed, ctx.rank, 3 + ctx.rank)
        weights, out = values(seed, ctx.rank, *x.shape), []
        for options in settings:
            layer = given_to(impl.SyncBatchNorm(CHANNELS, **options).double(), seed)
            x.requires_grad_().grad = None
            y = layer(x)
            (y * weights).sum().backward()
            out.append((y.detach(), x.grad))
        for name in ("weight", "bias"):
            layer = given_to(impl.SyncBatchNorm(CHANNELS).double(), seed)
            frozen = getattr(layer, name).requires_grad_(False)
            frozen.grad = torch.full_like(frozen, 7.0)
            (layer(x.detach()) * weights).sum().backward()
            still = bool((frozen.grad == 7).all())
            out.append((still, {n: p.grad for n, p in layer.named_parameters() if n != name}))
        return out

    results = run(body, 2)
    xs = [input_of(seed, rank, 3 + rank) for rank in range(2)]
    weights = [values(seed, rank, *x.shape) for rank, x in enumerate(xs)]
    for number, options in enumerate(settings):
        ys, of_x = OneProcess(seed, **options)(xs, weights)
        for rank, result in enumerate(results):
            y, grad = result[number]
            expect_close(y, ys[rank], what=f"{options}: the output", rank=rank, **EXACT)
            expect_close(grad, of_x[rank], what=f"{options}: gradient of x", rank=rank, **EXACT)
    one = OneProcess(seed)
    one(xs, weights)
    for number, name in enumerate(("weight", "bias"), len(settings)):
        for rank, result in enumerate(results):
            what = f"whether the frozen {name} keeps its stale gradient"
            expect_equal(result[number][0], True, what=what, rank=rank, cause="frozen")
        for other, want in one.parameters().items():
            if other != name:
                total = sum(result[number][1][other] for result in results)
                what = f"{name} is frozen: the sum of the ranks' gradients of {other}"
                expect_close(total, want, what=what, **EXACT)


@exercise("2.28", "virtual", asserts="keeps resources second life")
def test_what_is_kept_for_backward(impl, run, seed):
    """x itself and a few numbers per channel; backward twice; a second derivative is refused."""
    shape = (16, CHANNELS, 12)

    def body(ctx):
        layer = given_to(impl.SyncBatchNorm(CHANNELS), seed)
        x = input_of(seed, ctx.rank, shape[0], shape[2]).float().requires_grad_()
        kept = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = layer(x)
        others = sum(size for place, size in kept.items() if place != x.data_ptr())
        torch.autograd.backward(y, x.detach().cos(), retain_graph=True)
        first, x.grad = x.grad, None
        y.backward(x.detach().cos())
        second = x.grad.clone()
        y = layer(x)
        try:
            (once,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            once.square().sum().backward()
            twice = "accepted"
        except RuntimeError:
            twice = "RuntimeError"
        return others, first, second, twice

    for rank, (others, first, second, twice) in enumerate(run(body, 2)):
        if others > 8 * 8 * CHANNELS:
            text = f"beside x itself {others} bytes are kept for backward, where x has "
            fail(f"{text}{4 * 16 * CHANNELS * 12}", cause="memory-kept", rank=rank)
        what = "the gradient of a second backward through the same graph"
        expect_close(second, first, what=what, rank=rank, rtol=1e-5, atol=1e-5)
        expect_equal(twice, "RuntimeError", what="a second derivative", rank=rank, cause="accepted")
