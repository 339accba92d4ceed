"""Checks of exercise 2.24: routers in groups, in 16 bits, their messages and their refusals."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

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
from tests.phase2.parallel_values import values
from tests.phase2.routed import TOKENS, balance, load_of, route, tokens_of
from tests.phase2.test_mixture_of_experts import EXACT, factors_of

WIDTH, EXPERTS = 4, 6


@exercise("2.24", "virtual", asserts="group drawn from-the-seed")
def test_routers_of_two_groups(impl, run, seed):
    """Load, loss and jitter are the group's; the weight comes from the seed alone."""

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        torch.manual_seed(ctx.rank)
        drawn = [
            impl.Router(64, EXPERTS, seed=seed + n, group=mine).weight.detach() for n in (0, 1)
        ]
        router = impl.Router(WIDTH, EXPERTS, top_k=2, seed=seed, group=mine)
        routing = router(tokens_of(seed, ctx.rank, WIDTH).float())
        jittery = impl.Router(2, 3, top_k=3, jitter=0.5, seed=seed, group=mine).double()
        jittery.weight.data.copy_(torch.tensor([[0, 0], [1, 0], [0, 1.0]]))
        factors = factors_of(jittery(torch.ones(5, 2).double()))
        p = values(seed, ctx.rank, TOKENS[ctx.rank], EXPERTS).softmax(-1)
        load = impl.count_choices(impl.choose(p, torch.zeros(EXPERTS), 3)[0], EXPERTS, mine)
        with ctx.region("loss"):
            alone = impl.balance_loss(p, load, 3, mine)
        losses = routing.loss.detach(), alone
        return drawn, router.weight.detach(), routing.load_E, losses, factors

    results = run(body, 4)
    for rank, ((drawn, other), *_) in enumerate(results):
        kind = drawn.dtype, tuple(drawn.shape)
        expect_equal(kind, (torch.float32, (EXPERTS, 64)), what="the weight", rank=rank)
        same = torch.equal(drawn, results[0][0][0]) and not torch.equal(drawn, other)
        what = "whether the weight depends on the seed, and on nothing else"
        expect_equal(same, True, what=what, rank=rank, cause="not-from-the-seed")
    for ranks in ([1, 3], [0, 2]):
        weight = results[ranks[0]][1].double()
        zero = torch.zeros(EXPERTS)
        parts = [route(tokens_of(seed, r, WIDTH), weight, zero, 2, None) for r in ranks]
        load = load_of([chosen for chosen, *_ in parts], EXPERTS)
        for r in ranks:
            got = results[r][2]
            results.logs[r].select(region="loss").sent_at_most(0, "balance_loss sends nothing")
            what = f"the load in the group of ranks {ranks}"
            expect_equal(got.tolist(), load.tolist(), what=what, rank=r, cause="wrong-load")
        mean = sum(results[r][3][0].double() for r in ranks) / 2
        what = f"the mean loss of ranks {ranks}"
        expect_close(mean, balance([p for *_, p in parts], load), what=what, rtol=1e-4, atol=1e-5)
        every = [values(seed, r, TOKENS[r], EXPERTS).softmax(-1) for r in ranks]
        three = load_of([p.topk(3).indices for p in every], EXPERTS)
        mean = sum(results[r][3][1] for r in ranks) / 2
        expect_close(mean, balance(every, three), what=f"{what}, balance_loss alone", **EXACT)
    for one, other, alike in ((0, 1, True), (2, 3, True), (0, 2, False)):
        same = torch.equal(results[one][4], results[other][4])
        what = f"whether ranks {one} and {other} draw the same jitter"
        expect_equal(same, alike, what=what, rank=other, cause="jitter-of-the-rank")


@exercise("2.24", "virtual", asserts="dtype probabilities gradients")
def test_router_in_sixteen_bits(impl, run, seed):
    """Probabilities, weights and loss are float32 at least, also for 16-bit tokens and autocast."""
    kinds = ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16))
    kinds += ((torch.float32, torch.float32), (torch.float32, torch.float64))

    def body(ctx):
        out = []
        for of_x, of_weight in kinds:
            router = impl.Router(WIDTH, EXPERTS, top_k=2).to(of_weight)
            router.weight.data.copy_(values(seed, 1, EXPERTS, WIDTH))
            x = values(seed, 2, 16, WIDTH).to(of_x).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=of_weight == torch.float32):
                routing = router(x)
            (routing.weights_NK[:, 0].sum() + routing.loss).backward()
            grads = router.weight.grad, x.grad
            out.append((routing.weights_NK.detach(), routing.loss.detach(), grads))
        return out

    for (of_x, of_weight), (weights, loss, grads) in zip(kinds, run(body, 1)[0], strict=True):
        wide = torch.float64 if of_weight == torch.float64 else torch.float32
        weight = values(seed, 1, EXPERTS, WIDTH).to(of_weight).to(wide)
        x = values(seed, 2, 16, WIDTH).to(of_x).to(wide)
        _, want, _, p = route(x, weight, torch.zeros(EXPERTS), 2, None)
        what = f"tokens in {of_x}, weight in {of_weight}: "
        near = EXACT if wide == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        expect_close(weights, want, what=f"{what}the weights", **near)
        expect_equal((loss.dtype, loss.shape), (wide, ()), what=f"{what}the loss", cause="dtype")
        dtypes = tuple(grad.dtype for grad in grads)
        what = f"{what}the gradients' dtypes"
        expect_equal(dtypes, (of_weight, of_x), what=what, cause="dtype")


@exercise("2.24", "virtual gloo cuda", nccl=True, asserts="cost group")
def test_one_all_reduce_of_the_load(impl, run, seed):
    """8 bytes per expert in forward, nothing in backward, whatever the tokens are."""

    def body(ctx):
        router = impl.Router(WIDTH, EXPERTS, top_k=2, capacity_factor=1.0).to(ctx.device)
        x = tokens_of(seed, ctx.rank, WIDTH).float().to(ctx.device).requires_grad_()
        with ctx.region("forward"):
            routing = router(x)
        with ctx.region("backward"):
            (routing.weights_NK.sum() + routing.loss).backward()

    for log in run(body, 3).logs:
        sent = [(event.op, event.payload) for event in log.select(region="forward").events]
        if sent != [("all_reduce", 8 * EXPERTS)]:
            text = f"one all-reduce of {8 * EXPERTS} bytes is enough in forward, got {sent}"
            fail(text, cause="cost", rank=log.rank)
        if log.select(region="backward").events:
            fail("backward sends something", cause="cost", rank=log.rank)


@exercise("2.24", "nccl", asserts="host")
def test_router_never_waits_for_the_gpu(impl, run, seed):
    """No value is read: the host runs ahead of its GPU."""

    def body(ctx):
        router = impl.Router(WIDTH, EXPERTS, top_k=2, capacity_factor=1.0, jitter=0.1)
        router = router.to(ctx.device)
        x = torch.ones(8, WIDTH, device=ctx.device)
        router(x)
        with ctx.region("step"):
            routing = router(x)
            (routing.weights_NK.sum() + routing.loss).backward()
            router.update_bias()

    expect_few_waits(run(body, 2), 0, "a step of the router", copies=False)


@exercise("2.24", "virtual", asserts="no-tokens alone")
def test_a_group_without_tokens(impl, run):
    """Load and loss are zero, gradients are zeros, and the bias stays; one token is enough."""

    def body(ctx):
        router = impl.Router(WIDTH, EXPERTS, top_k=2, capacity_factor=1.0, jitter=0.1)
        routing = router(torch.empty(2, 0, WIDTH))
        (routing.weights_NK.sum() + routing.loss).backward()
        router.update_bias()
        shapes = [tuple(t.shape) for t in routing]
        p = torch.tensor([[0.75, 0.25]])[ctx.rank :]  # one token of two ranks
        one = impl.balance_loss(p, torch.tensor([1, 0]), 1).item()
        return shapes, routing.loss.item(), router.weight.grad, router.bias_E, one

    for rank, (shapes, loss, grad, bias, one) in enumerate(run(body, 2)):
        want = (3.0, 0.0)[rank]  # their mean is 2 · 1 · 0.75
        expect_equal(one, want, what="the loss of the group's only token", rank=rank)
        want = [(0, 2), (0, 2), (0, 2), (EXPERTS,), ()]
        expect_equal(shapes, want, what="the shapes without tokens", rank=rank)
        expect_equal(loss, 0.0, what="the loss without tokens", rank=rank)
        expect_close(grad, torch.zeros(EXPERTS, WIDTH), what="the gradient", rank=rank)
        expect_close(bias, torch.zeros(EXPERTS), what="the bias", rank=rank)


@exercise("2.24", "virtual", asserts="refusals")
def test_router_refuses_bad_input(impl, run):
    """Bad settings, a wrong width and a foreign process are a ValueError; nothing is sent."""

    def body(ctx):
        group = dist.new_group([0, 1])
        router = impl.Router(WIDTH, EXPERTS)
        found = [
            refusal(impl.Router, WIDTH, EXPERTS, top_k=0),
            refusal(impl.Router, WIDTH, EXPERTS, top_k=EXPERTS + 1),
            refusal(impl.Router, WIDTH, EXPERTS, capacity_factor=0.0),
            refusal(impl.Router, WIDTH, EXPERTS, capacity_factor=math.nan),
            refusal(impl.Router, WIDTH, EXPERTS, jitter=1.0),
            refusal(impl.Router, WIDTH, EXPERTS, jitter=-0.1),
            refusal(impl.Router, WIDTH, EXPERTS, seed=-1),
            refusal(router, torch.ones(3, WIDTH + 1)),
        ]
        outside = refusal(impl.Router, WIDTH, EXPERTS, group=group) if ctx.rank == 2 else found[0]
        return [*found, outside]

    calls = ["top_k=0", "top_k beyond E", "a capacity factor of 0", "a capacity factor of nan"]
    calls += ["a jitter of 1", "a negative jitter", "a negative seed", "a wrong width"]
    expect_refused(run(body, 3), [*calls, "a process outside of the group"])


@trace("2.24")
def trace_router(impl):
    """Three steps of a router with 8 experts, 2 for each token."""

    def body(ctx):
        router = impl.Router(128, 8, top_k=2, capacity_factor=1.25, jitter=0.01)
        x = torch.ones(64 * TOKENS[0], 128)
        for step in ctx.steps(4):
            with ctx.region(f"step {step}"):
                routing = router(x)
                (routing.weights_NK.sum() + routing.loss).backward()
                router.update_bias()

    return body
