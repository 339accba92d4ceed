"""Checks of exercise 2.25: what experts on W ranks send, in 16 bits, and what they refuse."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from tests.phase2.expert_layers import (
    EXPERTS,
    INNER,
    WIDTH,
    bias_of,
    layer_of,
    tokens,
    weights_of,
)
from tests.phase2.parallel_values import values
from tests.phase2.routed import route

SIZE = WIDTH * 8  # bytes of a row


@exercise("2.25", "virtual gloo cuda", nccl=True, asserts="cost sizes-bytes moved-bytes")
def test_bytes_and_messages_equal_the_formula(impl, run, seed):
    """Sizes, M rows out, R rows back; in backward the same two with exchanged sizes."""

    def body(ctx):
        layer = layer_of(impl, seed, ctx.device, top_k=2, capacity_factor=1.0)
        rows = []
        for needs in (True, False):
            x = tokens(seed, ctx.rank).to(ctx.device).requires_grad_(needs)
            with ctx.region(f"forward {needs}"):
                y, routing = layer(x)
            with ctx.region(f"backward {needs}"):
                (y.sum() + routing.loss).backward()
            rows.append(sum(layer.rows))
        with ctx.region("divide"):
            impl.divide_expert_gradients([layer.up, layer.down])
        return rows

    results = run(body, 3)
    routed = [route(tokens(seed, r), weights_of(seed)[0], bias_of(), 2, 1.0) for r in range(3)]
    for rank, log in enumerate(results.logs):
        kept, each = routed[rank][2], EXPERTS // 3
        goes = int(kept.sum()) * SIZE
        lives = [(chosen // each == rank) & k for chosen, _, k, _ in routed]
        comes = sum(int(mine.sum()) for mine in lives) * SIZE
        expect_equal(results[rank], [comes // SIZE] * 2, what="rows of this rank", rank=rank)
        wanted = {
            "forward": [
                ("all_reduce", 8 * EXPERTS),
                ("all_to_all", 8 * EXPERTS),
                ("all_to_all", goes),
                ("all_to_all", comes),
            ],
            "backward True": [("all_to_all", goes), ("all_to_all", comes)],
            "backward False": [("all_to_all", goes)],
            "divide": [],
        }
        for region in (
            "forward True",
            "forward False",
            "backward True",
            "backward False",
            "divide",
        ):
            want = wanted.get(region) or wanted.get(region.split()[0], [])
            found = [(event.op, event.payload) for event in log.select(region=region).events]
            what = f"{region} (whether x needs a gradient): operators and bytes that a rank brings"
            expect_equal(found, want, what=what, rank=rank, cause="cost")


@exercise("2.25", "nccl", asserts="host")
def test_layer_waits_once_for_the_gpu(impl, run, seed):
    """The host reads the sizes, once per forward, and nothing in backward."""

    def body(ctx):
        layer = layer_of(impl, seed, ctx.device, top_k=2, capacity_factor=1.0)
        x = tokens(seed, ctx.rank).to(ctx.device).requires_grad_()
        layer(x)
        with ctx.region("step"):
            y, routing = layer(x)
            (y.sum() + routing.loss).backward()
            impl.divide_expert_gradients([layer.up, layer.down])

    expect_few_waits(run(body, 3), 1, "a step of the layer", copies=False)


@exercise("2.25", "virtual", asserts="weighed dtype dropped")
def test_layer_in_sixteen_bits(impl, run, seed):
    """y has the tokens' dtype; the weighted sum is in the weights' and is rounded once."""
    count = 8

    def body(ctx):
        router = impl.Router(WIDTH, count, top_k=count)
        router.weight.data.copy_(values(seed, 1, count, WIDTH))
        up, down = (values(seed, s, 1, n, m) for s, n, m in ((2, WIDTH, 3), (3, 3, WIDTH)))
        up, down = (t.expand(count, -1, -1).bfloat16().requires_grad_() for t in (up, down))
        layer = impl.ExpertParallel(router, up, down)
        alone = impl.ExpertParallel(impl.Router(WIDTH, 2), up[:2], down[:2])
        x = values(seed, 9, 20, WIDTH).bfloat16().requires_grad_()
        y, routing = layer(x)
        y.float().sum().backward()
        row = impl.compute_experts(x, [[20]], up[:1], down[:1])
        grads = [t.grad.dtype for t in (x, layer.up, layer.down, router.weight)]
        kinds = layer.up.dtype, y.dtype, routing.weights_NK.dtype, alone(x)[0].dtype
        return y.detach(), row.detach(), grads, kinds

    for rank, (y, row, grads, kinds) in enumerate(run(body, 2)):
        half = torch.bfloat16
        what = "dtypes of experts, y, weights, y of one expert"
        expect_equal(kinds, (half, half, torch.float32, half), what=what, rank=rank, cause="dtype")
        want = [half, half, half, torch.float32]
        expect_equal(grads, want, what="the gradients' dtypes", rank=rank, cause="dtype")
        apart = (y.float() - row.float()).abs() > 2**-8 * row.float().abs()
        if apart.any():
            text = f"{int(apart.sum())} elements of y are not the equal rows of {count} experts, "
            text += "whose weights add up to one: add up in float32, and round once"
            fail(text, cause="rounded-often", rank=rank)


@exercise("2.25", "virtual", asserts="divided parameters moved-nothing")
def test_gradients_are_divided_once(impl, run, seed):
    """In place, by the group's size; missing, frozen and tied ones are treated as told."""

    def body(ctx):
        group = [dist.new_group(ranks) for ranks in ([0, 2, 3], [1])][ctx.rank == 1]
        named = {name: nn.Parameter(torch.ones(3)) for name in ("own", "missing", "frozen")}
        named["half"] = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        for name in ("own", "frozen", "half"):
            named[name].grad = torch.full((3,), 6.0, dtype=named[name].dtype)
        named["frozen"].requires_grad_(False)
        before = named["own"].grad
        with ctx.region("divide"):
            impl.divide_expert_gradients(iter([*named.values(), named["own"]]), group)
            impl.divide_expert_gradients([], group)
        return {n: p.grad for n, p in named.items()}, before

    results = run(body, 4)
    for rank, (grads, before) in enumerate(results):
        w = 1 if rank == 1 else 3
        expect_equal(grads["missing"], None, what="a missing gradient", rank=rank)
        for name, value in (("own", 6 / w), ("half", 6 / w), ("frozen", 6.0)):
            want = torch.full((3,), value, dtype=grads[name].dtype)
            expect_close(grads[name], want, what=f"the gradient ({name})", rank=rank)
        expect_close(before, grads["own"], what="the tensor that p.grad was before", rank=rank)
        results.logs[rank].select(region="divide").sent_at_most(0, "dividing sends nothing")


@exercise("2.25", "virtual", asserts="life alone rows")
def test_layer_lives_on(impl, run, seed):
    """No rank has tokens; no gradients are wanted; a second backward adds up."""

    def body(ctx):
        layer = layer_of(impl, seed, top_k=2)
        nothing = torch.empty(2, 0, WIDTH, dtype=torch.float64, requires_grad=True)
        y, routing = layer(nothing)
        (y.sum() + routing.loss).backward()
        rows, shape = [*layer.rows], tuple(y.shape)
        zeros = [float(p.grad.abs().sum()) for p in layer.parameters()]
        with torch.no_grad():
            x = tokens(seed, ctx.rank)
            y, routing = layer(x)
            kept = x.clone()
        held = y.requires_grad, torch.equal(x, kept)
        y, routing = layer(x)
        y.sum().backward(retain_graph=True)
        once = layer.up.grad.clone()
        y.sum().backward()
        return rows, shape, zeros, held, once, layer.up.grad

    for rank, (rows, shape, zeros, held, once, twice) in enumerate(run(body, 2)):
        expect_equal(rows, [0] * (EXPERTS // 2), what="rows without tokens", rank=rank)
        expect_equal(shape, (2, 0, WIDTH), what="y's shape without tokens", rank=rank)
        expect_equal(zeros, [0.0] * 3, what="gradients without tokens", rank=rank)
        what = "whether y needs a gradient under no_grad, and x is unchanged"
        expect_equal(held, (False, True), what=what, rank=rank)
        expect_close(twice, 2 * once, what="the gradient after two backwards", rank=rank)


@exercise("2.25", "virtual", asserts="own-experts resources")
def test_only_this_ranks_experts_stay(impl, run, seed):
    """The whole weights are neither changed nor kept; nothing is alive after backward."""
    width, inner, count = 32, 64, 8

    def body(ctx):
        whole = [
            values(seed, s, count, *n).float()
            for s, n in ((1, (width, inner)), (2, (inner, width)))
        ]
        copies = [t.clone() for t in whole]
        frozen = whole[1]
        layer = impl.ExpertParallel(
            impl.Router(width, count, top_k=2), whole[0].requires_grad_(), frozen
        )
        same = all(torch.equal(a, b) for a, b in zip(whole, copies, strict=True))
        parameters = [
            (tuple(p.shape), p.requires_grad, p.grad is None) for p in (layer.up, layer.down)
        ]
        mine = torch.equal(layer.up, copies[0].chunk(ctx.world_size)[ctx.rank])
        x = torch.ones(64, width)
        with PeakMemory() as memory:
            y, routing = layer(x)
            (y.sum() + routing.loss).backward()
            grads = [p.grad for p in layer.parameters() if p.grad is not None]
            del y, routing
            left = memory.current - sum(g.untyped_storage().nbytes() for g in grads)
        return same, parameters, mine, left, layer.up.untyped_storage().nbytes()

    for rank, (same, parameters, mine, left, held) in enumerate(run(body, 2)):
        what = "whether the whole weights are unchanged"
        expect_equal(same, True, what=what, rank=rank, cause="input-changed")
        want = [((4, width, inner), True, True), ((4, inner, width), False, True)]
        what = "shape, trainable, without a gradient: up and down"
        expect_equal(parameters, want, what=what, rank=rank)
        expect_equal(mine, True, what="whether up is this rank's block", rank=rank)
        expect_equal(held, 4 * width * inner * 4, what="bytes that up keeps", rank=rank)
        if left > 64 * width * 4:
            text = f"{left:,} bytes are alive after backward, beside the gradients"
            fail(text, cause="too-much-memory", rank=rank)


@exercise("2.25", "virtual", asserts="refusals")
def test_layer_refuses_bad_input(impl, run, seed):
    """Experts that do not divide, weights that do not fit: ValueError, and nothing is sent."""

    def body(ctx):
        router, odd = impl.Router(WIDTH, 6), impl.Router(WIDTH, 4)
        up, down = torch.ones(6, WIDTH, INNER), torch.ones(6, INNER, WIDTH)
        layer = impl.ExpertParallel(router, up, down)
        return [
            refusal(impl.ExpertParallel, odd, up[:4], down[:4]),
            refusal(impl.ExpertParallel, router, up[:3], down[:3]),
            refusal(impl.ExpertParallel, router, up[:, 1:], down),
            refusal(impl.ExpertParallel, router, up, down[..., 1:]),
            refusal(impl.ExpertParallel, router, up, down[:, 1:]),
            refusal(layer, torch.ones(3, WIDTH + 1)),
        ]

    calls = ["4 experts on 3 ranks", "weights of 3 experts for 6", "up of another width"]
    calls += ["down of another width", "another inner width", "tokens of another width"]
    expect_refused(run(body, 3), calls)


@trace("2.25")
def trace_experts(impl):
    """Three steps of 8 experts of width 128, 2 for each token, shared out over the ranks."""

    def body(ctx):
        router = impl.Router(128, 8, top_k=2, capacity_factor=1.25, jitter=0.01)
        up, down = torch.ones(8, 128, 256) / 128, torch.ones(8, 256, 128) / 256
        layer = impl.ExpertParallel(router, up.requires_grad_(), down.requires_grad_())
        x = values(0, ctx.rank, 256, 128).float().requires_grad_()
        for step in ctx.steps(4):
            with ctx.region(f"step {step}"):
                y, routing = layer(x)
                (y.square().mean() + 0.01 * routing.loss).backward()
                impl.divide_expert_gradients([layer.up, layer.down])

    return body
