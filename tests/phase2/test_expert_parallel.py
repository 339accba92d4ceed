"""Checks of exercise 2.25: experts on W ranks, and the tokens that travel to them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading import exercise, expect_close, expect_equal, fail
from tests.phase2.expert_layers import (
    EXPERTS,
    INNER,
    UNLOVED,
    WIDTH,
    bias_of,
    layer_of,
    one_process,
    tokens,
    weights_of,
)
from tests.phase2.parallel_values import values
from tests.phase2.routed import route

EXACT = {"rtol": 1e-9, "atol": 1e-10}
SETTINGS = ((1, None), (2, 0.5), (3, 1.25))  # top_k, capacity factor


def mine_of(seed, rank, x):
    """What each element of y counts for in the loss of a rank."""
    return values(seed, 70 + rank, *x.shape)


@exercise(
    "2.25",
    "virtual gloo cuda",
    nccl=True,
    asserts="layer own-experts rows dropped empty alone divided layout",
)
def test_layer_equals_one_process(impl, run, seed, cases):
    """Output, rows and every gradient, with drops, an unloved expert, a rank without tokens."""
    worlds = cases(4, 1, 2, 3)

    def body(ctx):
        out = []
        for top_k, factor in SETTINGS:
            layer = layer_of(impl, seed, ctx.device, top_k=top_k, capacity_factor=factor)
            x = tokens(seed, ctx.rank).to(ctx.device).requires_grad_()
            y, routing = layer(x.unsqueeze(1))
            own = (y.squeeze(1) * mine_of(seed, ctx.rank, x).to(ctx.device)).sum()
            (own + 3 * routing.loss).backward()
            impl.divide_expert_gradients([layer.up, layer.down])
            held = layer.router.weight.grad, x.grad, layer.up.grad, layer.down.grad
            shape = tuple(y.shape)
            grads = [t.cpu() for t in held]
            out.append((y.detach().squeeze(1).cpu(), grads, layer.rows, shape))
        return out

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for number, (top_k, factor) in enumerate(SETTINGS):
            what = f"{w} ranks, top_k={top_k}, capacity factor {factor}: "
            expect_one_process(seed, w, top_k, factor, [rank[number] for rank in results], what)


def expect_one_process(seed, w, top_k, factor, found, place):
    """Compare outputs and gradients of the ranks with those of one process."""
    weights = [t.requires_grad_() for t in weights_of(seed)]
    xs = [tokens(seed, r).detach().requires_grad_() for r in range(w)]
    outputs, _, loss, rows = one_process(weights, xs, top_k, factor)
    own = [(y * mine_of(seed, r, y)).sum() for r, y in enumerate(outputs)]
    right = torch.autograd.grad(sum(own) / w + 3 * loss, [*weights, *xs])
    of_router, of_up, of_down, *of_x = right
    for rank, (y, grads, counted, shape) in enumerate(found):
        expect_equal(shape, (len(xs[rank]), 1, WIDTH), what=f"{place}y's shape", rank=rank)
        expect_close(y, outputs[rank], what=f"{place}y", rank=rank, **EXACT)
        e = EXPERTS // w
        mine = slice(rank * e, (rank + 1) * e)
        what = f"{place}the rows of this rank's experts"
        expect_equal(counted, rows[mine], what=what, rank=rank, cause="wrong-rows")
        what = f"{place}W times the gradient of x"
        expect_close(grads[1] / w, of_x[rank], what=what, rank=rank, **EXACT)
        for name, got, want in (("up", grads[2], of_up), ("down", grads[3], of_down)):
            what = f"{place}the divided gradient of {name}"
            expect_close(got, want[mine], what=what, rank=rank, **EXACT)
            if UNLOVED in range(mine.start, mine.stop):
                what = f"{place}the gradient of {name} of an expert without rows"
                none = torch.zeros_like(got[0])
                expect_close(got[UNLOVED - mine.start], none, what=what, rank=rank)
    mean = sum(grads[0] for _, grads, _, _ in found) / w
    expect_close(mean, of_router, what=f"{place}the router's mean gradient", **EXACT)


def sizes_of(seed, w, nobody=None):
    """How many rows rank i gives rank j; ``nobody`` gives and gets none."""
    table = (values(seed, 5, w, w).abs() * 3).long().tolist()
    return [[0 if nobody in (i, j) else table[i][j] for j in range(w)] for i in range(w)]


@exercise("2.25", "virtual gloo cuda", asserts="moved moved-bytes dtype layout alone")
def test_rows_move_and_gradients_come_back(impl, run, seed, cases):
    """Rows by rank, in any dtype and strides; a rank that gives and gets nothing takes part."""
    worlds, kinds = cases(3, 1, 2, 4), (torch.float64, torch.bfloat16)

    def body(ctx):
        w, rank, out = ctx.world_size, ctx.rank, []
        for nobody in (None, w - 1):
            table = sizes_of(seed, w, nobody)
            gives, gets = table[rank], [row[rank] for row in table]
            for dtype in kinds:
                x = values(seed, rank, 3, sum(gives)).to(dtype).to(ctx.device).T.requires_grad_()
                y = impl.move_rows(x, gives, gets)
                own = values(seed, 30 + rank, sum(gets), 3).to(ctx.device, dtype)
                grad = torch.autograd.grad((y * own).sum(), x)[0]
                out.append((y.detach().cpu(), grad.cpu()))
        return out

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for number, (nobody, dtype) in enumerate((n, d) for n in (None, w - 1) for d in kinds):
            table = sizes_of(seed, w, nobody)
            given = [
                values(seed, r, 3, sum(table[r])).to(dtype).T.split(table[r]) for r in range(w)
            ]
            came = [
                values(seed, 30 + r, sum(row[r] for row in table), 3)
                .to(dtype)
                .split([row[r] for row in table])
                for r in range(w)
            ]
            for rank in range(w):
                y, grad = results[rank][number]
                what = f"{w} ranks, {dtype}: the rows that arrive"
                expect_close(y, torch.cat([g[rank] for g in given]), what=what, rank=rank)
                what = f"{w} ranks, {dtype}: the gradient of the rows that left"
                expect_close(grad, torch.cat([c[rank] for c in came]), what=what, rank=rank)


@exercise("2.25", "virtual", asserts="plan plan-order")
def test_the_plan_sorts_by_expert(impl, run, seed):
    """Kept choices by expert, tokens in order; both sides know all sizes."""
    top_k, e = 2, EXPERTS // 3

    def body(ctx):
        layer = layer_of(impl, seed, top_k=top_k, capacity_factor=1.0)
        plan = impl.plan_dispatch(layer.router(tokens(seed, ctx.rank)))
        return plan.order_M, plan.gives, plan.gets

    results = run(body, 3)
    found = []
    for rank in range(3):
        chosen, _, kept, _ = route(tokens(seed, rank), weights_of(seed)[0], bias_of(), top_k, 1.0)
        flat = [(j, m) for m, j in enumerate(chosen.flatten().tolist()) if kept.flatten()[m]]
        found.append(sorted(flat))
    for rank, (order, gives, gets) in enumerate(results):
        want = [m for _, m in found[rank]]
        what = "the places of the kept choices, by expert"
        expect_equal(order.tolist(), want, what=what, rank=rank, cause="wrong-order")
        owners = [[j // e for j, _ in every] for every in found]
        want = [owners[rank].count(r) for r in range(3)]
        what = "the rows for each rank"
        expect_equal([*gives], want, what=what, rank=rank, cause="wrong-sizes")
        mine = range(rank * e, rank * e + e)
        want = [[[j for j, _ in every].count(expert) for expert in mine] for every in found]
        what = "the rows from each rank for each of this rank's experts"
        got = [[*counts] for counts in gets]
        expect_equal(got, want, what=what, rank=rank, cause="wrong-sizes")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))


@exercise("2.25", "virtual", asserts="computed few-products empty")
def test_experts_compute_their_rows_at_once(impl, run, seed):
    """The result of each row's expert, by one pair of products per expert."""
    gets = [[3, 0, 2], [0, 0, 0], [4, 0, 1], [1, 0, 5]]

    def body(ctx):
        x = values(seed, 1, 16, WIDTH).requires_grad_()
        up = values(seed, 2, 3, WIDTH, INNER).requires_grad_()
        down = values(seed, 3, 3, INNER, WIDTH).requires_grad_()
        with Products() as products:
            y = impl.compute_experts(x, gets, up, down)
        grads = torch.autograd.grad((y * y.detach().sin()).sum(), [x, up, down])
        return y.detach(), grads, products.count

    y, grads, count = run(body, 1)[0]
    x = values(seed, 1, 16, WIDTH).requires_grad_()
    up = values(seed, 2, 3, WIDTH, INNER).requires_grad_()
    down = values(seed, 3, 3, INNER, WIDTH).requires_grad_()
    of_row = [e for counts in gets for e, n in enumerate(counts) for _ in range(n)]
    each = [F.gelu(x[m : m + 1] @ up[e]) @ down[e] for m, e in enumerate(of_row)]
    want = torch.cat(each)
    expect_close(y, want, what="the rows of the experts", **EXACT)
    right = torch.autograd.grad((want * want.detach().sin()).sum(), [x, up, down])
    for name, got, true in zip(("the rows", "up", "down"), grads, right, strict=True):
        expect_close(got, true, what=f"the gradient of {name}", **EXACT)
    if count > 6:
        text = f"{count} matrix products for 3 experts: two for each are enough, on all its rows"
        fail(text, cause="too-many-products")


@exercise("2.25", "virtual", asserts="group copies dtype life divided")
def test_two_groups_with_the_same_experts(impl, run, seed):
    """Experts on ranks {0, 2} and {1, 3}, float64, two forwards; copies average their gradients."""

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        copies = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][ctx.rank > 1]
        layer = layer_of(impl, seed, group=mine, top_k=2, capacity_factor=1.0)
        x = tokens(seed, ctx.rank).requires_grad_()
        own = mine_of(seed, ctx.rank, x)
        first, second = layer(x), layer(2 * x)
        for y, routing in (first, second):
            ((y * own).sum() + routing.loss).backward()
        impl.divide_expert_gradients([layer.up, layer.down], mine)
        for p in (layer.up, layer.down):
            dist.all_reduce(p.grad, group=copies)
            p.grad /= 2
        dist.all_reduce(layer.router.weight.grad)
        outputs = [y.detach() for y, _ in (first, second)]
        return outputs, layer.up.grad, layer.down.grad, layer.router.weight.grad / 4, x.grad

    results = run(body, 4)
    weights = [t.requires_grad_() for t in weights_of(seed)]
    xs = [tokens(seed, r).detach().requires_grad_() for r in range(4)]
    total, wanted = torch.zeros(()).double(), {}
    for ranks in ([1, 3], [0, 2]):
        for times in (1, 2):
            outputs, _, loss, _ = one_process(weights, [times * xs[r] for r in ranks], 2, 1.0)
            for r, y in zip(ranks, outputs, strict=True):
                wanted[r, times] = y
                total = total + (y * mine_of(seed, r, y)).sum() / 4 + loss / 4
    router, up, down, *of_x = torch.autograd.grad(total, [*weights, *xs])
    for rank, (outputs, of_up, of_down, of_router, x) in enumerate(results):
        for times, y in enumerate(outputs, 1):
            want = wanted[rank, times]
            expect_close(y, want, what=f"y of {times}·x in a group", rank=rank, **EXACT)
        half = rank // 2
        mine = slice(half * EXPERTS // 2, (half + 1) * EXPERTS // 2)
        for name, got, want in (
            ("up, averaged over the copies", of_up, up[mine]),
            ("down, averaged over the copies", of_down, down[mine]),
            ("the router, averaged over all", of_router, router),
            ("x, over 4", x / 4, of_x[rank]),
        ):
            expect_close(got, want, what=f"the gradient of {name}", rank=rank, **EXACT)
