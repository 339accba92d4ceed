"""Checks of exercise 3.17: which dtype everything has, what is rounded and what is not."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
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
from tests.phase3.fsdp_models import (
    DEPTH,
    ROOT,
    UNIT,
    WHOLE,
    Stack,
    batch,
    gradient_pieces,
    loss_of,
    merged_gradients,
    net,
    traced,
    use_of_freed_is_told,
    values_of,
)

BF16, FP32 = torch.bfloat16, torch.float32


def wrapped(impl, seed: int, device, reduce_dtype=FP32, prefetch: bool = False):
    inner = net(seed, device, FP32)
    inner.offset = inner.offset.to(BF16)
    flat_type = partial(impl.MixedPrecisionFlat, compute_dtype=BF16, reduce_dtype=reduce_dtype)
    wrapper = impl.module("fsdp_prefetch").PrefetchFSDP if prefetch else impl.module("fsdp").FSDP
    return wrapper(inner, inner.units(), flat_type=flat_type), inner


@exercise("3.17", "virtual gloo cuda")
@use_of_freed_is_told()
def test_every_tensor_has_its_dtype(impl, run, seed):
    """Parameters in use bfloat16; shards, gradients and the optimizer's state float32."""

    def body(ctx):
        model, inner = wrapped(impl, seed, ctx.device)
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, batch(seed, ctx.rank, 0, ctx.device, BF16)).backward()
        optimizer.step()
        shards = list(model.parameters())
        return {
            "parameters in use": sorted({str(v.dtype) for v in values_of(model, inner).values()}),
            "shards": sorted({str(s.dtype) for s in shards}),
            "gradients": sorted({str(s.grad.dtype) for s in shards if s.grad is not None}),
            "moments": sorted({str(e["exp_avg"].dtype) for e in optimizer.state.values()}),
        }

    for rank, got in enumerate(run(body, 2)):
        for what, dtypes in got.items():
            want = ["torch.bfloat16" if what == "parameters in use" else "torch.float32"]
            expect_equal(dtypes, want, what=f"dtype of {what}", rank=rank, cause="dtype")


class Indexed(nn.Module):
    """A frozen parameter of integers, which no 16-bit number can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.table = nn.Parameter(torch.tensor([257, -100_003, 2**40 + 1]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [str(self.table.dtype), *self.table.tolist()]
        return self.linear(x)


@exercise("3.17", "virtual")
@use_of_freed_is_told()
def test_integers_stay(impl, run):
    """Parameters that are not floating point keep dtype and values in forward."""

    def body(ctx):
        inner = Indexed()
        flat_type = partial(impl.MixedPrecisionFlat, compute_dtype=BF16)
        model = impl.module("fsdp").FSDP(inner, flat_type=flat_type)
        model(torch.ones(1, 3, dtype=BF16)).sum().backward()
        return inner.seen

    for rank, seen in enumerate(run(body, 2)):
        want = ["torch.int64", 257, -100_003, 2**40 + 1]
        expect_equal(seen, want, what="the integers in forward", rank=rank, cause="dtype")


@exercise("3.17", "virtual gloo")
def test_full_parameters_are_rounded_master_weights(impl, run, seed):
    """What a forward sees is the float32 parameter, rounded once."""

    def body(ctx):
        model, inner = wrapped(impl, seed, ctx.device)
        return values_of(model, inner)

    plain = dict(net(seed, dtype=FP32).named_parameters(remove_duplicate=False))
    for rank, got in enumerate(run(body, 3)):
        for name, value in got.items():
            want = plain[name].detach().to(BF16)
            expect_close(value, want, what=f"{name} in forward", rank=rank, rtol=0, atol=0)


@exercise("3.17", "virtual gloo cuda")
@use_of_freed_is_told()
def test_gradients_are_summed_in_float32(impl, run, seed, cases):
    """The mean of the ranks' bfloat16 gradients, exact to float32: no sum is rounded to 16 bits."""

    def body(ctx):
        model, _ = wrapped(impl, seed, ctx.device, prefetch=True)
        loss_of(model, batch(seed, ctx.rank, 0, ctx.device, BF16)).backward()
        return gradient_pieces(model)

    def reference(ctx, ranks):  # where the ranks compute: a GPU rounds to 16 bits otherwise
        found = []
        for rank in range(ranks):
            alone = net(seed, ctx.device, FP32).to(BF16)
            loss_of(alone, batch(seed, rank, 0, ctx.device, BF16)).backward()
            named = alone.named_parameters()
            found.append({n: p.grad.cpu().float() for n, p in named if p.grad is not None})
        return found

    sizes = cases(5, 3, 1)
    every = run.worlds(body, sizes)
    own = run(reference, 1, max(sizes))[0]
    for world_size, results in zip(sizes, every, strict=True):
        got = merged_gradients(results)
        for name in own[0]:
            parts = [part[name] for part in own[:world_size]]
            expect_close(
                got.get(name),
                torch.stack(parts).mean(0),
                what=f"{world_size} ranks: gradient of {name}",
                contributions=parts,
                rtol=5e-5,  # a hundredth of two roundings to bfloat16
                atol=1e-7,
            )


@exercise("3.17", "virtual")
def test_small_updates_are_not_lost(impl, run, seed):
    """Twenty updates of a thousandth add up in the master weights, and reach the forward."""

    def body(ctx):
        model, inner = wrapped(impl, seed, ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with torch.no_grad():
            for shard in model.parameters():
                shard.fill_(1.0)
        for _ in range(20):
            values_of(model, inner)
            for shard in model.parameters():
                shard.grad = torch.ones_like(shard)
            optimizer.step()
        return values_of(model, inner)

    for rank, got in enumerate(run(body, 2)):
        for name in ("inside.weight", "blocks.1.first.weight"):
            ones = torch.ones_like(got[name])
            if torch.equal(got[name], ones):
                fail(
                    f"{name} is still 1 after 20 steps of 0.001: each was rounded away, the master "
                    "weights have no more digits than bfloat16",
                    cause="updates-lost",
                    rank=rank,
                )
            expect_close(
                got[name],
                ones * 0.98,
                what=f"{name} after 20 steps of 0.001 from 1",
                rank=rank,
                rtol=0.004,
                atol=0,
            )


@exercise("3.17", "virtual")
@use_of_freed_is_told()
def test_bytes_of_a_step(impl, run, seed):
    """Gathered at 2 bytes per element; reduced at 4, or at 2 if asked for."""

    def body(ctx, reduce_dtype):
        inner = Stack()
        flat_type = partial(
            impl.MixedPrecisionFlat, compute_dtype=BF16, reduce_dtype=getattr(torch, reduce_dtype)
        )
        model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=flat_type)
        with ctx.region("step"):
            model(torch.ones(1, 2, dtype=BF16)).sum().backward()

    world_size = 4
    for dtype, parts in (("float32", 2.0), ("bfloat16", 1.5)):
        for log in run(body, world_size, dtype).logs:
            log = log.select(region="step")
            for op, want in (("all_gather", "bfloat16"), ("reduce_scatter", dtype)):
                dtypes = sorted({e.dtype for e in log.select(op=op).events})
                what = f"dtype of {op} with reduce_dtype {dtype}"
                expect_equal(dtypes, [want], what=what, rank=log.rank, cause="message-dtype")
            share = (world_size - 1) / world_size * WHOLE
            formula = "(W-1)/W·Ψ·(2·2 bytes gathered + the reduction's)"
            log.sent_at_most(parts * share + 12 * (DEPTH + 1) * world_size, formula)


@exercise("3.17", "virtual")
@use_of_freed_is_told()
def test_full_parameters_take_half(impl, run, seed):
    """Live bytes in forward: the float32 shards, root and unit at 2 bytes per element."""

    def body(ctx):
        points: dict[str, int] = {}

        def tell(point: str) -> None:
            points[point] = max(points.get(point, 0), memory.current)

        with PeakMemory() as memory:
            inner = Stack()
            flat_type = partial(impl.MixedPrecisionFlat, compute_dtype=BF16)
            model = impl.module("fsdp").FSDP(inner, list(inner.layers), flat_type=flat_type)
            for layer in inner.layers:
                layer.tell = tell
            model(torch.ones(1, 2, dtype=BF16)).sum().backward()
        return points["forward"]

    limit = WHOLE / 4 + (ROOT + UNIT) / 2 + 6000
    for rank, got in enumerate(run(body, 4)):
        if got > limit:
            fail(
                f"rank {rank} has {got:,} B of tensors while a unit computes, expected at most "
                f"{limit:,.0f} B: float32 shards and one unit in bfloat16",
                cause="too-much-memory",
                rank=rank,
            )


@exercise("3.17", "virtual")
def test_other_dtypes_are_refused(impl, run, seed):
    """Integers can't be computed or reduced in: ValueError."""

    def body(ctx):
        flat = lambda **wrong: partial(impl.MixedPrecisionFlat, **wrong)
        wrapper = impl.module("fsdp").FSDP
        return [
            refusal(wrapper, net(seed), flat_type=flat(compute_dtype=torch.int8)),
            refusal(wrapper, net(seed), flat_type=flat(reduce_dtype=torch.int32)),
        ]

    calls = [("computing in int8", ()), ("reducing in int32", ())]
    expect_refused(run(body, 2), calls)


@trace("3.17")
def trace_precision(impl):
    """Two steps of a small GPT in bfloat16."""

    def wrap(*args) -> nn.Module:
        return impl.module("fsdp_prefetch").PrefetchFSDP(*args, flat_type=impl.MixedPrecisionFlat)

    return traced(wrap)
