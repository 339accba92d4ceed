"""Checks of exercise 2.15: column- and row-parallel layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import storage_bytes
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


@exercise("2.15", "virtual")
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
            expect_equal(trainable, want, what="requires_grad as in the whole", rank=rank)
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
    """What a rank has of the MLP's output and of the gradient of x before they are summed."""
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


@exercise("2.15", "virtual gloo cuda")
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


@exercise("2.15", "virtual gloo")
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


@exercise("2.15", "virtual gloo")
def test_split_and_gather_along_any_dimension(impl, run, seed):
    """split_to_ranks and gather_from_ranks, values and gradients, for dimensions 0, 1 and -1."""
    shape = (6, 3, 12)

    def body(ctx):
        out = []
        for dim in (0, 1, -1):
            x = values(seed, 7, *shape).requires_grad_()
            part = impl.split_to_ranks(x, dim)
            held = [part.is_contiguous(), storage_bytes([part])]
            (part * block(values(seed, 8, *shape), ctx.rank, 3, dim)).sum().backward()
            mine = block(values(seed, 7, *shape), ctx.rank, 3, dim).requires_grad_()
            whole = impl.gather_from_ranks(mine, dim)
            grad = torch.autograd.grad((whole * values(seed, 8, *shape)).sum(), mine)[0]
            out.append([part.detach(), held, x.grad, whole.detach(), grad])
        return out

    x, grad = values(seed, 7, *shape), values(seed, 8, *shape)
    for rank, results in enumerate(run(body, 3)):
        for dim, (part, held, grad_x, whole, grad_part) in zip((0, 1, -1), results, strict=True):
            what = f"along dimension {dim}"
            mine, mine_grad = block(x, rank, 3, dim), block(grad, rank, 3, dim)
            expect_close(part, mine, what=f"split {what}", rank=rank, **EXACT)
            expect_close(grad_x, grad, what=f"gradient of split {what}", rank=rank, **EXACT)
            expect_close(whole, x, what=f"gathered {what}", rank=rank, chunks=3, **EXACT)
            expect_close(
                grad_part,
                mine_grad,
                what=f"gradient of gather {what}",
                rank=rank,
                rules=summed_again(mine_grad, 3),
                **EXACT,
            )
            if held != [True, part.numel() * 8]:
                text = f"the block {what} is a view: it keeps all of x in memory"
                fail(text, cause="too-much-memory", rank=rank)


@exercise("2.15", "virtual gloo")
def test_layers_send_what_the_formula_says(impl, run, seed):
    """Column: one all-reduce of x in backward. Row: one of the output in forward. No more."""
    n = 60

    def body(ctx):
        up, down = layers(seed)
        column, row = impl.ColumnParallelLinear(up), impl.RowParallelLinear(down)
        x = torch.ones(n, D, dtype=torch.float64, requires_grad=True)
        with ctx.region("forward"):
            y = row(F.gelu(column(x)))
        with ctx.region("backward"):
            y.sum().backward()
        gathering = impl.ColumnParallelLinear(up, gather_output=True)
        with ctx.region("gathering"):
            gathering(x)

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            nbytes = 2 * (w - 1) / w * n * D * 8
            for region in ("forward", "backward"):
                part = log.select(region=region)
                part.sent_at_most(nbytes, f"one all-reduce of {n}·{D} numbers in {region}")
                part.sent_at_least(nbytes, f"one all-reduce of {n}·{D} numbers in {region}")
            gathered = (w - 1) / w * n * INNER * 8
            part = log.select(region="gathering")
            part.sent_at_most(gathered, f"an all-gather to {n}·{INNER} numbers")


@exercise("2.15", "virtual")
def test_layers_refuse_what_does_not_divide(impl, run, seed):
    """ValueError with the numbers, on every rank, before anything is sent."""

    def body(ctx):
        def linear(width: int, features: int) -> nn.Linear:
            return nn.Linear(width, features, dtype=torch.float64)

        column, row = impl.ColumnParallelLinear, impl.RowParallelLinear
        x = torch.ones(2, 11, dtype=torch.float64)
        return [
            refusal(column, linear(9, 10)),
            refusal(row, linear(10, 9)),
            refusal(impl.split_to_ranks, x, 1),
            refusal(column(linear(9, 12)), x),
            refusal(row(linear(12, 9)), x),
        ]

    calls = [
        ("10 output features over 3 ranks", (10, 3)),
        ("10 input features over 3 ranks", (10, 3)),
        ("splitting 11 elements over 3 ranks", (11, 3)),
        ("11 features into 9 columns", (9, 11)),
        ("11 features into rows of 4", (4, 11)),
    ]
    expect_refused(run(body, 3), calls)


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
