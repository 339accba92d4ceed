"""Checks of exercise 2.15: column- and row-parallel layers."""

from __future__ import annotations

import math
import weakref
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, storage_bytes
from tests.phase2.parallel_values import strided, summed_again, values

EXACT = {"rtol": 1e-10, "atol": 1e-12}
D, INNER = 12, 24  # divide by 1, 2, 3 and 4 ranks


def layers(seed: int, bias: bool = True, scale: float = 1.0) -> tuple[nn.Linear, nn.Linear]:
    """``up`` (12 → 24) and ``down`` (24 → 12), the same on every rank, biases far from zero."""
    up, down = nn.Linear(D, INNER, bias, dtype=torch.float64), nn.Linear(INNER, D, bias).double()
    for salt, p in enumerate([*up.parameters(), *down.parameters()], 50):
        p.data = values(seed, salt, *p.shape) * scale + (p.ndim == 1)
    return up, down


def block(full: torch.Tensor, rank: int, world_size: int, dim: int) -> torch.Tensor:
    return full.chunk(world_size, dim)[rank]


def other_weights(case: Case) -> Diagnosis:
    """A rule: whatever they are, they are not the given ones."""
    text = "they are not the weights of the layer that was given: every world size must start alike"
    return Diagnosis("other-weights", text)


@exercise("2.15", "virtual", asserts="column row not-kept silent parameters")
def test_shards_are_the_whole(impl, run, seed):
    """Put together, the ranks' blocks are the layer that was given; each holds 1/W of the bytes."""
    worlds = (1, 2, 3, 4)

    def body(ctx):
        up, down = layers(seed)
        down.requires_grad_(False)
        column, row = impl.ColumnParallelLinear(up), impl.RowParallelLinear(down)
        held = [storage_bytes(m.parameters()) for m in (column, row)]
        trainable = [p.requires_grad for m in (column, row) for p in (m.weight, m.bias)]
        bare = impl.RowParallelLinear(layers(seed, bias=False)[1]).bias
        tensors = [p.detach() for p in (column.weight, column.bias, row.weight, row.bias)]
        return tensors, held, trainable, up.weight.detach(), bare is None

    up, down = layers(seed)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        every = [tensors for tensors, *_ in results]
        whole = [("column weight", 0, 0, up.weight), ("column bias", 1, 0, up.bias)]
        for name, place, dim, want in [*whole, ("row weight", 2, 1, down.weight)]:
            expect_close(
                torch.cat([tensors[place] for tensors in every], dim),
                want,
                what=f"the {name}s of {w} ranks, put together",
                rules=(other_weights,),
                **EXACT,
            )
        for rank, (tensors, held, trainable, given, bare) in enumerate(results):
            kept = torch.equal(given, up.weight)
            expect_close(tensors[3], down.bias, what="row bias (whole)", rank=rank, **EXACT)
            most = [(D + 1) * INNER * 8 // w, (D * INNER // w + D) * 8]
            for name, got, limit in zip(("column", "row"), held, most, strict=True):
                if got > limit:
                    fail(
                        f"{w} ranks: the {name}-parallel layer of rank {rank} holds {got} bytes, "
                        f"its share are {limit} (a view keeps the whole in memory)",
                        cause="too-much-memory",
                        rank=rank,
                    )
            want = [True, True, False, False]
            names = "column weight", "column bias", "frozen row weight", "frozen row bias"
            for name, got, right in zip(names, trainable, want, strict=True):
                what = f"requires_grad of the {name}"
                expect_equal(got, right, what=what, rank=rank, cause="requires-grad")
            expect_equal([kept, bare], [True, True], what="whole kept, no bias is None", rank=rank)
            if results.logs[rank].events:
                fail("sharding a layer needs no communication", cause="too-many-messages")


def mlp_of_one(seed: int, scale: float):
    """Output and gradients of one process: x → up → GELU → down."""
    up, down = layers(seed, scale=scale)
    x = values(seed, 3, 5, D).requires_grad_()
    y = down(F.gelu(up(x)))
    (y * values(seed, 4, 5, D)).sum().backward()
    return {
        "output": y.detach(),
        "gradient of x": x.grad,
        "gradient of up.weight": up.weight.grad,
        "gradient of up.bias": up.bias.grad,
        "gradient of down.weight": down.weight.grad,
        "gradient of down.bias": down.bias.grad,
    }


def parts_of_one(seed: int, scale: float, rank: int, world_size: int) -> dict:
    """A rank's terms of the MLP's output and of the gradient of x, before they are summed."""
    up, down = layers(seed, scale=scale)
    x = values(seed, 3, 5, D)
    mine = slice(INNER * rank // world_size, INNER * (rank + 1) // world_size)
    inner = up(x).detach().requires_grad_()
    active = F.gelu(inner)
    (down(active) * values(seed, 4, 5, D)).sum().backward()
    term = active[:, mine] @ down.weight[:, mine].T + down.bias
    return {"output": term, "gradient of x": inner.grad[:, mine] @ up.weight[mine]}


def never_summed(parts: dict, name: str):
    """A rule: a rank's part of what should be a sum over the ranks."""

    def rule(case: Case) -> Diagnosis | None:
        if name not in parts or not case.fits(parts[name].detach()):
            return None
        text = "it is this rank's part only: it has to be summed over the ranks"
        return Diagnosis("only-own", text)

    return (rule,)


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the dimension that is shared out


@exercise("2.15", "virtual gloo cuda", asserts="column-forward row-forward")
def test_column_then_row_equals_one_process(impl, run, seed, cases):
    """x → column → GELU → row: output and all gradients, with biases, as in one process."""
    worlds = cases(3, 1, 2, 4)
    scale = 0.4

    def body(ctx):
        up, down = (layer.to(ctx.device) for layer in layers(seed, scale=scale))
        column, row = impl.ColumnParallelLinear(up), impl.RowParallelLinear(down)
        x = values(seed, 3, 5, D).to(ctx.device).requires_grad_()
        y = row(F.gelu(column(x)))
        (y * values(seed, 4, 5, D).to(ctx.device)).sum().backward()
        grads = [column.weight.grad, column.bias.grad, row.weight.grad, row.bias.grad]
        return [None if t is None else t.detach().cpu() for t in (y, x.grad, *grads)]

    want = mlp_of_one(seed, scale)
    bias = layers(seed, scale=scale)[1].bias.detach().expand(5, D)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            parts = parts_of_one(seed, scale, rank, w)
            for tensor, (name, whole) in zip(got, want.items(), strict=True):
                dim = CUT.get(name.removeprefix("gradient of "))
                right = whole if dim is None else block(whole, rank, w, dim)
                expect_close(
                    tensor,
                    right,
                    what=f"{w} ranks: {name}",
                    rank=rank,
                    bias=bias if name == "output" and w > 1 else None,
                    rules=never_summed(parts, name) + summed_again(right, w),
                    **EXACT,
                )


@exercise(
    "2.15",
    "virtual gloo",
    asserts="column-forward row-forward split-input gather-output layout",
)
def test_gathered_output_and_split_input(impl, run, seed, cases):
    """A column layer that gathers, a row layer that splits: each alone equals the whole layer."""
    worlds = cases(3, 2, 4)

    def body(ctx):
        up, down = layers(seed)
        column = impl.ColumnParallelLinear(up, gather_output=True)
        row = impl.RowParallelLinear(down, split_input=True)
        out = []
        for layer, salt, width in ((column, 5, D), (row, 6, INNER)):
            x = strided(values(seed, salt, 7, width)).requires_grad_()
            y = layer(x)
            (y * values(seed, salt + 10, *y.shape)).sum().backward()
            out += [y.detach(), x.grad, layer.weight.grad]
        return out

    up, down = layers(seed)
    want = []
    for layer, salt, width in ((up, 5, D), (down, 6, INNER)):
        x = values(seed, salt, 7, width).requires_grad_()
        y = layer(x)
        (y * values(seed, salt + 10, *y.shape)).sum().backward()
        want += [y.detach(), x.grad, layer.weight.grad]
    names = ["gathered output", "gradient of x", "gradient of the weight"]
    names += ["output for a whole x", "gradient of the whole x", "gradient of the weight"]
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            for k, name in enumerate(names):
                right = want[k] if k not in (2, 5) else block(want[k], rank, w, int(k == 5))
                what = f"{'column' if k < 3 else 'row'} layer, {w} ranks: {name}"
                rules = summed_again(right, w)
                expect_close(got[k], right, what=what, rank=rank, rules=rules, **EXACT)


@exercise("2.15", "virtual gloo", asserts="split own-memory split-gradient layout")
def test_split_and_gather_along_any_dimension(impl, run, seed):
    """split_to_ranks and gather_from_ranks, values and gradients, for dimensions 0, 1, -1, -2."""
    shape = (6, 4, 12)

    def body(ctx):
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][ctx.rank in (0, 2)]
        place, out = int(ctx.rank > 1), []
        other = [dist.new_group([2]), dist.new_group([3, 0, 1])][ctx.rank != 2]
        whole = values(seed, 7, *shape)
        part = impl.split_to_ranks(whole, 0, other)
        again = impl.gather_from_ranks(part, 0, other)
        aside = [part, again, part.untyped_storage().data_ptr() != whole.data_ptr()]
        for dim in DIMS:
            x = values(seed, 7, *shape).requires_grad_()
            part = impl.split_to_ranks(x, dim, mine)
            held = [part.is_contiguous(), storage_bytes([part])]
            (part * block(values(seed, 8, *shape), place, 2, dim)).sum().backward()
            own = block(values(seed, 7, *shape), place, 2, dim).requires_grad_()
            whole = impl.gather_from_ranks(own, dim, mine)
            grad = torch.autograd.grad((whole * values(seed, 8, *shape)).sum(), own)[0]
            large = impl.split_to_ranks(numbers(shape), dim, mine)
            again = impl.gather_from_ranks(block(numbers(shape), place, 2, dim), dim, mine)
            laid = [part.is_contiguous() for part in (large, whole, again)]
            out.append([part.detach(), x.grad, whole.detach(), grad, large, again, held, laid])
        return aside, out

    x, grad = values(seed, 7, *shape), values(seed, 8, *shape)
    for rank, ((part, again, apart), results) in enumerate(run(body, 4)):
        others = [2] if rank == 2 else [0, 1, 3]
        right = block(x, others.index(rank), len(others), 0)
        expect_close(part, right, what=f"split of x among the ranks {others}", rank=rank, **EXACT)
        expect_close(again, x, what=f"gathered from the ranks {others}", rank=rank, **EXACT)
        what = f"whether the block of {len(others)} rank(s) has memory of its own"
        expect_equal(apart, True, what=what, rank=rank, cause="too-much-memory")
        place, members = int(rank > 1), (0, 2) if rank in (0, 2) else (1, 3)
        for dim, (*got, held, laid) in zip(DIMS, results, strict=True):
            what = f"along dimension {dim} in the group {members}"
            for name, tensor, want, cut in (
                ("split", got[0], x, True),
                ("gradient of split", got[1], grad, False),
                ("gathered", got[2], x, False),
                ("gradient of gather", got[3], grad, True),
                ("split of large integers, transposed,", got[4], numbers(shape), True),
                ("gathered large integers, transposed,", got[5], numbers(shape), False),
            ):
                right = block(want, place, 2, dim) if cut else want
                rules = summed_again(right, 2)
                if cut:
                    rules += other_block(block(want, 1 - place, 2, dim))
                text, chunks = f"{name} {what}", 0 if cut else 2
                known = {"chunks": chunks} if chunks else {}
                expect_close(tensor, right, what=text, rank=rank, rules=rules, **known, **EXACT)
            if held != [True, got[0].numel() * 8]:
                text = f"the block {what} is a view: it keeps all of x in memory"
                fail(text, cause="too-much-memory", rank=rank)
            text = f"{what}: contiguous split integers, gathered floats, gathered integers"
            expect_equal(laid, [True] * 3, what=text, rank=rank, cause="layout")


DIMS = (0, 1, -1, -2)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Integers above 2^53, stored the other way round."""
    count = math.prod(shape)
    return (torch.arange(count) + 2**53).view(shape[::-1]).permute(2, 1, 0)


def other_block(other: torch.Tensor):
    """A rule: the block is that of another rank."""

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(other):
            return None
        text = "it is the block of the group's other rank: blocks go by the rank in the group"
        return Diagnosis("other-block", text)

    return (rule,)


@exercise("2.15", "virtual gloo", asserts="column-bytes row-bytes split-bytes cost")
def test_layers_send_what_the_formula_says(impl, run, seed):
    """Column: one all-reduce of x in backward. Row: one all-reduce of the
    output in forward. No more."""
    n, dtypes = 60, (torch.float64, torch.bfloat16)

    def body(ctx):
        for dtype in dtypes:
            up, down = (layer.to(dtype) for layer in layers(seed))
            column, row = impl.ColumnParallelLinear(up), impl.RowParallelLinear(down)
            gathering = impl.ColumnParallelLinear(up, gather_output=True)
            splitting = impl.RowParallelLinear(up, split_input=True)
            x = torch.ones(n, D, dtype=dtype, requires_grad=True)
            for name, model in (
                ("", nn.Sequential(column, nn.GELU(), row)),
                ("gathering ", gathering),
                ("splitting ", splitting),
            ):
                with ctx.region(f"{name}forward, {dtype}"):
                    y = model(x)
                with ctx.region(f"{name}backward, {dtype}"):
                    y.sum().backward()
            with ctx.region(f"backward to the weights, {dtype}"):
                column(x.detach()).sum().backward()

    for w in (3, 2):
        for log, dtype in product(run(body, w).logs, dtypes):
            log.all_waited()
            share, x_bytes = (w - 1) / w, n * D * dtype.itemsize
            for region, nbytes, what in (
                ("forward", 2 * share * x_bytes, f"one all-reduce of {n}·{D} numbers"),
                ("backward", 2 * share * x_bytes, f"one all-reduce of {n}·{D} numbers"),
                ("gathering forward", share * 2 * x_bytes, f"an all-gather to {n}·{INNER} numbers"),
                ("gathering backward", 2 * share * x_bytes, f"an all-reduce of {n}·{D} numbers"),
                ("splitting forward", 4 * share * x_bytes, f"an all-reduce of {n}·{INNER} numbers"),
                ("splitting backward", share * x_bytes, f"an all-gather to {n}·{D} numbers"),
                ("backward to the weights", 0, "nothing where x needs no gradient"),
            ):
                part = log.select(region=f"{region}, {dtype}")
                part.sent_at_most(nbytes, f"{what} of {dtype} in {region}")
                part.sent_at_least(nbytes, f"{what} of {dtype} in {region}")


def whole_numbers(seed: int, salt: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """-1, 0 and 1: products and short sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def odd_layer(seed: int, dtype: torch.dtype, bias: bool, frozen: str) -> nn.Linear:
    """12 → 12, exact numbers, transposed in memory, with a stale gradient and a frozen half."""
    linear = nn.Linear(D, D, bias, dtype=dtype)
    for salt, (name, p) in enumerate(linear.named_parameters()):
        p.data = whole_numbers(seed, salt, dtype, *p.shape)
        p.data = strided(p.data) if p.ndim == 2 else p.data
        p.grad = torch.full_like(p, 3.0)
        p.requires_grad_(name != frozen)
    return linear


ODD = (  # dtype, bias, the frozen parameter, leading dimensions of x
    (torch.float64, True, "weight", (2, 3)),
    (torch.bfloat16, True, "bias", (4,)),
    (torch.float16, False, "", ()),
    (torch.float32, True, "", (0,)),
)
VALUES = ("output", "gradient of x", "gradient of the weight", "gradient of the bias")


def called_twice(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list:
    """Output and gradients of a layer that is used twice in one graph; two backwards through it."""
    x.requires_grad_()
    y = layer(x)
    z = y + layer(x)
    for _ in range(2):
        z.backward(grad, retain_graph=True)
    of_bias = None if layer.bias is None else layer.bias.grad
    return [y.detach(), x.grad, layer.weight.grad, of_bias]


def state(layer: nn.Module) -> list:
    """A layer's parameters, as an observer sees them."""
    named = dict(layer.named_parameters())
    return [(n, p.dtype, p.requires_grad, p.is_contiguous()) for n, p in sorted(named.items())]


@exercise(
    "2.15",
    "virtual",
    asserts="column row column-forward row-forward gather-output split-input own-parameters "
    "not-kept leading group dtype layout parameters life resources",
)
def test_odd_layers_in_groups(impl, run, seed):
    """16 bits, half frozen, no bias, any leading dimensions, used twice: in two groups at once."""

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        out = []
        every = list(enumerate(ODD))
        for number, (dtype, bias, frozen, leading) in every[::-1] if even else every:
            for wrapped in (True, False) if even else (False, True):
                seeds = seed + even
                with PeakMemory() as memory:
                    whole = odd_layer(seeds, dtype, bias, frozen)
                    options = {"gather_output": True} if wrapped else {}
                    column = impl.ColumnParallelLinear(whole, mine, **options)
                    options = {"split_input": True} if wrapped else {}
                    row = impl.RowParallelLinear(whole, mine, **options)
                    grads = [whole.weight.grad is not None, column.weight.grad, row.weight.grad]
                    alive = weakref.ref(whole), weakref.ref(whole.weight)
                    del whole
                kept = [a() is not None for a in alive]
                share = storage_bytes([*column.parameters(), *row.parameters()])
                kept.append(memory.current > share)
                x = whole_numbers(seeds, 10 + number, dtype, *leading, D)
                grad = whole_numbers(seeds, 20 + number, dtype, *leading, D)
                place = int(ctx.rank > 1)
                of_x, of_y = (t if wrapped else t.chunk(2, -1)[place] for t in (x, grad))
                refused = [refusal(layer, torch.ones(3, 7)) for layer in (column, row)]
                ran = [
                    called_twice(column, x.clone(), of_y),
                    called_twice(row, of_x.clone(), grad),
                ]
                out.append((ran, [state(column), state(row)], grads, kept, refused))
        return out[::-1] if even else out

    for rank, results in enumerate(run(body, 4)):
        seeds, place = seed + (rank in (0, 2)), int(rank > 1)
        for number, (dtype, bias, frozen, leading) in enumerate(ODD):
            whole = odd_layer(seeds, dtype, bias, frozen)
            whole.weight.grad = None
            if bias:
                whole.bias.grad = None
            x = whole_numbers(seeds, 10 + number, dtype, *leading, D)
            grad = whole_numbers(seeds, 20 + number, dtype, *leading, D)
            want = called_twice(whole, x, grad)
            for wrapped in (False, True):
                ran, states, grads, kept, refused = results[2 * number + wrapped]
                what = f"{dtype}, {frozen or 'nothing'} frozen, x {(*leading, D)}"
                expect_refusals(refused, [f"{what}: 7 features"] * 2, rank=rank)
                text = f"{what}: kept are the whole layer, its weight, more memory than the share"
                expect_equal(kept, [False] * 3, what=text, rank=rank, cause="kept")
                expect_equal(grads, [True, None, None], what="stale gradients", rank=rank)
                names = ["bias"] * bias + ["weight"]
                seen = [(name, dtype, name != frozen, True) for name in names]
                text = f"{what}: (name, dtype, requires_grad, contiguous) of the parameters"
                for got in states:
                    expect_equal(got, seen, what=text, rank=rank, cause="parameters")
                cuts = [{0: -1, 2: 0, 3: 0}, {1: -1, 2: 1}]  # which values are cut, where
                for kind, got in enumerate(ran):
                    for k, name in enumerate(VALUES):
                        dim = cuts[kind].get(k)
                        if dim == -1 and wrapped:
                            dim = None
                        right = want[k]
                        if right is not None and dim is not None:
                            right = right.chunk(2, dim)[place]
                        title = f"{('column', 'row')[kind]} layer, {what}: {name}"
                        if right is None:
                            expect_equal(got[k], None, what=title, rank=rank, cause="frozen")
                        else:
                            rules = summed_again(right, 2)
                            exact = {"rtol": 0.0, "atol": 0.0}
                            expect_close(got[k], right, what=title, rank=rank, rules=rules, **exact)


@exercise("2.15", "virtual", asserts="divides width refusals")
def test_layers_refuse_what_does_not_divide(impl, run, seed):
    """ValueError on every rank, also on a rank outside of the group, before anything is sent."""

    def body(ctx):
        def linear(width: int, features: int) -> nn.Linear:
            return nn.Linear(width, features, dtype=torch.float64)

        column, row = impl.ColumnParallelLinear, impl.RowParallelLinear
        x = torch.ones(2, 11, dtype=torch.float64)
        refused = [
            refusal(column, linear(9, 10)),
            refusal(row, linear(10, 9)),
            refusal(impl.split_to_ranks, x, 1),
            refusal(impl.split_to_ranks, x, 0),
            refusal(column(linear(9, 12)), x),
            refusal(column(linear(9, 12), gather_output=True), x),
            refusal(row(linear(12, 9)), x),
            refusal(row(linear(12, 9)), torch.ones(2, 12, dtype=torch.float64)),
            refusal(row(linear(12, 9), split_input=True), x),
            refusal(row(linear(12, 9), split_input=True), torch.ones(2, 4, dtype=torch.float64)),
            refusal(row(linear(12, 9), split_input=True), torch.ones(2, 9, dtype=torch.float64)),
        ]
        group = dist.new_group([0, 1])
        if ctx.rank == 2:
            even = linear(12, 12)
            refused += [refusal(layer, even, group) for layer in (column, row)]
            refused.append(refusal(impl.split_to_ranks, torch.ones(2, 12), 1, group))
        return refused

    calls = [
        "10 output features over 3 ranks",
        "10 input features over 3 ranks",
        "splitting 11 elements over 3 ranks",
        "splitting 2 elements over 3 ranks",
        "11 features into 9 columns",
        "11 features into 9 columns, gathered",
        "11 features into rows of 4",
        "all 12 features into rows of 4",
        "11 features, to be split into rows of 4",
        "4 features, to be split into rows of 4",
        "9 features, to be split into rows of 4",
    ]
    outside = [f"{what} outside of the group" for what in ("column layer", "row layer", "split")]
    results = run(body, 3)
    expect_refusals(results[2][len(calls) :], outside, rank=2)
    results[2] = results[2][: len(calls)]
    expect_refused(results, calls)


@trace("2.15")
def trace_layers(impl):
    """Two steps of a two-layer MLP of width 256, forward and backward."""

    def body(ctx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            up, down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        column, row = impl.ColumnParallelLinear(up), impl.RowParallelLinear(down)
        x = torch.ones(512, 256, requires_grad=True)
        model = nn.Sequential(column, nn.GELU(), row)
        for step in ctx.steps(3):
            with ctx.region(f"step {step}"):
                model(x).square().mean().backward()

    return body
