"""Checks of exercise 3.17: the dtypes of all tensors, and which values are rounded."""

from __future__ import annotations

from functools import partial

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
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
from tests.phase3.raised import reworded

BF16, FP32 = torch.bfloat16, torch.float32


def wrapped(impl, seed: int, device, reduce_dtype=FP32, prefetch: bool = False):
    inner = net(seed, device, FP32)
    inner.offset = inner.offset.to(BF16)
    flat_type = partial(impl.MixedPrecisionFlat, compute_dtype=BF16, reduce_dtype=reduce_dtype)
    wrapper = impl.module("fsdp_prefetch").PrefetchFSDP if prefetch else impl.module("fsdp").FSDP
    return wrapper(inner, inner.units(), flat_type=flat_type), inner


@exercise("3.17", "virtual gloo cuda", asserts="compute-dtype shard-dtype dtype")
@use_of_freed_is_told()
@reworded(
    "same dtype",
    "a module computes with parameters and inputs of two dtypes: every floating-point parameter "
    "is gathered in compute_dtype, frozen ones too",
    "dtype",
)
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


GROUPS = ((1, 3), (0, 2, 4))  # the second does other things meanwhile
# of the parameters, of what computes, of the sum
DTYPES = (
    ("float32", "bfloat16", "float32"),
    ("float32", "bfloat16", "bfloat16"),
    ("float64", "float16", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("float64", "float32", "float64"),
    ("float32", "float32", "float64"),
    ("float64", "float64", "bfloat16"),
    ("float32", "bfloat16", "float16"),
)
EPSILON = {"float64": 1e-15, "float32": 1e-7, "bfloat16": 2.0**-8}


def gradient_of(seed: int, rank: int, which: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact; the first of the one group needs more than 8 bits."""
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    gradient = torch.randint(-60, 60, (2, 4), generator=generator).double()
    if which == 0:
        gradient[0, 0] = 256.0 if rank == 1 else 1.0
    return gradient


def values_in(seed: int, which: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A transposed matrix and a vector; its first number shows it if it is rounded twice."""
    generator = torch.Generator().manual_seed(seed + which)
    matrix = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    vector = torch.randn(3 + which, generator=generator, dtype=torch.float64)
    vector[0] = 1 + 2.0**-8 + 2.0**-20  # by way of float16 to bfloat16: 1
    return matrix.to(getattr(torch, dtype)).t(), vector.to(getattr(torch, dtype))


@exercise(
    "3.17",
    "virtual gloo",
    asserts="shard-dtype compute-dtype summed converted-then-divided rounded-before "
    "frozen-too message-dtype group dtype layout parameters alone life",
)
def test_vectors_of_every_dtype(impl, run, seed):
    """Own, computing and reducing dtypes: gathered values, messages, and the mean; twice."""

    def one(ctx, group, which, own, compute, reduce):
        module = nn.Module()
        matrix, vector = map(nn.Parameter, values_in(seed, which, own))
        places = {matrix: [(module, "matrix", "matrix")], vector: [(module, "vector", "vector")]}
        dtypes = {"compute_dtype": getattr(torch, compute), "reduce_dtype": getattr(torch, reduce)}
        still = nn.Parameter(values_in(seed, which, own)[1], requires_grad=False)
        frozen = impl.MixedPrecisionFlat(
            {still: [(module, "still", "still")]}, group, ctx.device, **dtypes
        )
        flat = impl.MixedPrecisionFlat(places, group, ctx.device, **dtypes)
        with ctx.region(f"{own} {compute} {reduce}"):
            for each in (frozen, flat):
                each.start_gather()
                each.finish_gather()
            seen = [getattr(module, n).detach().clone() for n in ("matrix", "vector", "still")]
            grads = []
            for _ in range(2):
                gradient = gradient_of(seed, ctx.rank, which).to(flat.leaves[0].dtype)
                flat.leaves[0].grad = None if ctx.rank == 3 else gradient
                flat.leaves[1].grad = torch.ones_like(flat.leaves[1])
                flat.start_reduce()
                flat.finish_reduce()
                grads.append(None if flat.shard.grad is None else flat.shard.grad.clone())
        return flat.shard.detach().clone(), seen, grads

    def body(ctx):
        groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
        which = int(ctx.rank in GROUPS[1])
        return [one(ctx, groups[which], which, *names) for names in DTYPES]

    results = run(body, 5)
    for rank, every in enumerate(results):
        for names, got in zip(DTYPES, every, strict=True):
            log = results.logs[rank].select(region=" ".join(names))
            judge_vector(got, seed, names, rank)
            messages = [(e.op, e.dtype) for e in log.events]
            want = [("all_gather", names[1])] * 2 + [("reduce_scatter", names[2])] * 2
            what = f"messages of {names[0]} parameters, {names[1]} computing, {names[2]} reduced"
            expect_equal(messages, want, what=what, rank=rank, cause="message-dtype")


def judge_vector(got, seed: int, names: tuple[str, str, str], rank: int) -> None:
    own, compute, reduce = names
    which = int(rank in GROUPS[1])
    ranks = GROUPS[which]
    shard, seen, grads = got
    where = f"{own} parameters, {compute} computing, reduced in {reduce}, ranks {ranks}"
    matrix, vector = values_in(seed, which, own)
    flat = torch.cat([matrix.flatten(), vector])
    chunk = -(-len(flat) // len(ranks))
    mine = slice(ranks.index(rank) * chunk, (ranks.index(rank) + 1) * chunk)
    exact = {"rank": rank, "rtol": 0.0, "atol": 0.0}
    expect_equal(str(shard.dtype), f"torch.{own}", what=f"{where}: shard", rank=rank, cause="dtype")
    expect_close(shard, flat[mine], what=f"{where}: shard", **exact)
    for value, want in zip(seen, (matrix, vector, vector), strict=True):
        kind, right = str(value.dtype), f"torch.{compute}"
        expect_equal(kind, right, what=f"{where}: gathered", rank=rank, cause="dtype")
        expect_close(value, want.to(value.dtype), what=f"{where}: gathered", **exact)
    parts = [gradient_of(seed, each, which) * (each != 3) for each in ranks]
    parts = [torch.cat([p.flatten(), torch.ones(len(vector)).double()])[mine] for p in parts]
    for times, gradient in enumerate(grads, 1):
        what = f"{where}: gradient after {times} reductions"
        if gradient is None:
            fail(f"{what}: there is none", cause="missing", rank=rank)
        kind = str(gradient.dtype)
        expect_equal(kind, f"torch.{own}", what=f"{what}: dtype", rank=rank, cause="dtype")
        near = EPSILON[own] * 2 * times
        known = {"contributions": parts} if times == 1 else {}
        mean = torch.stack(parts).mean(0) * times
        expect_divided_last(gradient.double(), parts, times, names, what, rank)
        if reduce == "bfloat16" and which == 0 and mine.start == 0:  # 257 has no 16-bit sum
            mean, gradient, known = mean[1:], gradient[1:], {}
        expect_close(gradient.double(), mean, what=what, rank=rank, rtol=near, atol=0, **known)


def expect_divided_last(
    got: torch.Tensor, parts, times: int, names: tuple[str, str, str], what: str, rank: int
) -> None:
    """The mean was not made in another dtype, and converted to the shard's then."""
    own, _, reduce = (getattr(torch, name) for name in names)
    total = torch.stack(parts).sum(0)
    right = (total.to(own) / len(parts)).double() * times
    for kind in {reduce, torch.float32} - {own}:
        wrong = (total.to(kind) / len(parts)).to(own).double() * times
        if torch.equal(got, wrong) and not torch.allclose(got, right, rtol=EPSILON[names[0]]):
            name, shards = str(kind).removeprefix("torch."), names[0]
            text = f"{what}: the mean is made in {name} and converted then, which rounds it: "
            text += f"convert the sum to {shards}, the shard's dtype, first, then divide"
            fail(text, cause="divided-too-early", rank=rank)


class Indexed(nn.Module):
    """A frozen parameter of integers, which no 16-bit number can hold, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.table = nn.Parameter(torch.tensor([257, -100_003, 2**40 + 1]), requires_grad=False)
        self.turn = nn.Parameter(torch.tensor([1 + 257j, -4097j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [str(self.table.dtype), *self.table.tolist()]
        self.seen += [str(self.turn.dtype), *self.turn.tolist()]
        y = self.linear(x)
        return y + (self.turn * (1 + 3j)).imag.sum() if self.turn.dtype == torch.complex64 else y


@exercise("3.17", "virtual", asserts="integers-stay dtype parameters")
@use_of_freed_is_told()
def test_integers_stay(impl, run):
    """Parameters that are not floating point keep dtype and values, complex gradients too."""

    def body(ctx):
        inner = Indexed()
        flat_type = partial(impl.MixedPrecisionFlat, compute_dtype=BF16)
        model = impl.module("fsdp").FSDP(inner, flat_type=flat_type)
        model(torch.ones(1, 3, dtype=BF16)).sum().backward()
        (turn,) = (s for s in model.parameters() if s.is_complex())
        gradient = None if turn.grad is None else (str(turn.grad.dtype), turn.grad.tolist())
        return inner.seen, gradient

    for rank, (seen, gradient) in enumerate(run(body, 2)):
        want = ["torch.int64", 257, -100_003, 2**40 + 1, "torch.complex64", 1 + 257j, -4097j]
        what = "integers and complex numbers in forward"
        expect_equal(seen, want, what=what, rank=rank, cause="dtype")
        want = ("torch.complex64", [6 + 2j])  # two elements of the loss, and one of two ranks'
        what = "the mean gradient of the complex parameter"
        expect_equal(gradient, want, what=what, rank=rank, cause="complex-gradient")


@exercise("3.17", "virtual gloo", asserts="compute-dtype rounded-before")
def test_full_parameters_are_rounded_master_weights(impl, run, seed):
    """A forward sees the float32 parameter, rounded once."""

    def body(ctx):
        model, inner = wrapped(impl, seed, ctx.device)
        return values_of(model, inner)

    plain = dict(net(seed, dtype=FP32).named_parameters(remove_duplicate=False))
    for rank, got in enumerate(run(body, 3)):
        for name, value in got.items():
            want = plain[name].detach().to(BF16)
            expect_close(value, want, what=f"{name} in forward", rank=rank, rtol=0, atol=0)


@exercise("3.17", "virtual gloo cuda", asserts="summed converted-then-divided parameters")
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


@exercise("3.17", "virtual", asserts="shard-dtype life")
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


@exercise("3.17", "virtual", asserts="message-dtype rounded-before cost")
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


@exercise("3.17", "virtual", asserts="resources compute-dtype")
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


NOT_REAL = ("int8", "bool", "complex64")


@exercise("3.17", "virtual", asserts="refused refusals")
def test_other_dtypes_are_refused(impl, run, seed):
    """Integers, booleans and complex numbers can't be computed or reduced in: ValueError."""

    def body(ctx):
        flat = lambda **wrong: partial(impl.MixedPrecisionFlat, **wrong)
        wrapper = impl.module("fsdp").FSDP
        return [
            refusal(wrapper, net(seed), flat_type=flat(**{kind: getattr(torch, name)}))
            for kind in ("compute_dtype", "reduce_dtype")
            for name in NOT_REAL
        ]

    calls = [f"computing in {name}" for name in NOT_REAL]
    expect_refused(run(body, 2), [*calls, *(f"reducing in {name}" for name in NOT_REAL)])


@trace("3.17")
def trace_precision(impl):
    """Two steps of a small GPT in bfloat16."""

    def wrap(*args) -> nn.Module:
        return impl.module("fsdp_prefetch").PrefetchFSDP(*args, flat_type=impl.MixedPrecisionFlat)

    return traced(wrap)
