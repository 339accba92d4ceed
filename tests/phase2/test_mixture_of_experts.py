"""Checks of exercise 2.24: the router of a mixture of experts."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    fail,
)
from tests.phase2.parallel_values import values
from tests.phase2.routed import (
    balance,
    best,
    first_choices,
    load_of,
    route,
    tokens_of,
)

EXACT = {"rtol": 1e-9, "atol": 1e-10}
FIELDS = ("experts_NK", "weights_NK", "kept_NK", "load_E", "loss")
WIDTH, EXPERTS = 6, 5
SETTINGS = ((1, None), (1, 1.0), (2, 0.5), (2, 1.25), (3, 1.0))  # top_k, capacity factor


def made(impl, seed, ctx, top_k, factor, **more):
    """A router in float64 with weights and a bias that every rank draws alike."""
    router = impl.Router(WIDTH, EXPERTS, top_k=top_k, capacity_factor=factor, **more)
    router = router.double().to(ctx.device)
    router.weight.data.copy_(values(seed, 1, EXPERTS, WIDTH))
    router.bias_E.copy_(values(seed, 2, EXPERTS) / 10)
    return router


def plain(routing) -> dict:
    return {name: getattr(routing, name).detach().cpu() for name in FIELDS}


@exercise("2.24", "virtual", asserts="best ties one-expert many-experts bias-apart")
def test_choices_and_weights(impl, run, seed):
    """Best first, of equal ones the smaller number; the bias chooses and does not weigh."""
    count = 40

    def drawn(case):
        p = (values(seed, 3 + case, 30, count) * (1 + case)).softmax(-1)
        return (p * 8).round() / 8 if case else p  # rounded, many are equal, some rows are zero

    def body(ctx):
        bias = torch.where(torch.arange(count) % 7 == seed % 7, 0.25, 0.0).double()
        out = []
        for case in (0, 1):
            p = drawn(case).requires_grad_()
            for top_k in (1, 2, count):
                experts, weights = impl.choose(p, bias, top_k)
                grad = torch.autograd.grad((weights * weights.detach().cos()).sum(), p)[0]
                out.append((experts, weights.detach(), grad))
        return bias, out

    bias, out = run(body, 1)[0]
    for number, (experts, weights, grad) in enumerate(out):
        case, top_k = divmod(number, 3)
        top_k, p = (1, 2, count)[top_k], drawn(case).requires_grad_()
        wanted = [best(row, top_k) for row in (p.detach() + bias).tolist()]
        what = f"experts of {top_k} choices"
        expect_equal(experts.tolist(), wanted, what=what, cause="wrong-experts")
        want = p.gather(1, experts)
        total = want.sum(1, keepdim=True)
        want = want if top_k == 1 else want / total.where(total > 0, torch.ones_like(total))
        expect_close(weights, want, what=f"weights of {top_k} choices", **EXACT)
        some = (total > 0).expand_as(p)  # where all are zero, any gradient will do
        right = torch.autograd.grad((want * want.detach().cos()).sum(), p)[0]
        what = f"gradient of the weights of {top_k} choices"
        expect_close(grad.where(some, 0), right.where(some, 0), what=what, **EXACT)


@exercise("2.24", "virtual", asserts="order layout")
def test_which_choices_are_dropped(impl, run, seed):
    """First choices in the order of the tokens, then second ones, until the expert is full."""
    shapes = [(n, k, e) for n in (0, 1, 2, 11) for k, e in ((1, 1), (1, 3), (2, 3), (4, 4))]

    def experts_of(n, k, e):
        order = values(seed, n + 20 * k + 100 * e, e, n).argsort(0)[:k]
        return order.T  # strided, and each expert once per token

    def body(ctx):
        return [
            [impl.keep_first(experts_of(*shape), shape[2], room).clone() for room in range(6)]
            for shape in shapes
        ]

    for shape, found in zip(shapes, run(body, 1)[0], strict=True):
        experts = experts_of(*shape).tolist()
        for room, kept in enumerate(found):
            what = f"{shape[0]} tokens, {shape[1]} of {shape[2]} experts, room for {room}: kept"
            expect_equal((kept.dtype, kept.shape), (torch.bool, shape[:2]), what=f"{what}, kind")
            want = first_choices(experts, room)
            expect_equal(kept.tolist(), want, what=what, cause="wrong-drops")


@exercise(
    "2.24",
    "virtual gloo cuda",
    nccl=True,
    asserts="routing load loss capacity probabilities gradients alone layout parameters",
)
def test_router_equals_one_process(impl, run, seed, cases):
    """Choices, weights, drops, load, loss and gradients, with uneven tokens."""
    worlds = cases(4, 1, 2, 3)

    def body(ctx):
        out = []
        for top_k, factor in SETTINGS:
            router = made(impl, seed, ctx, top_k, factor)
            x = tokens_of(seed, ctx.rank, 2 * WIDTH).to(ctx.device)[:, ::2].requires_grad_()
            routing = router(x.unsqueeze(1))
            mine = values(seed, 9, *routing.weights_NK.shape).to(ctx.device)
            own = (routing.weights_NK * mine).sum()
            (own + 3 * routing.loss).backward()
            frozen = made(impl, seed, ctx, top_k, factor).requires_grad_(False)
            still = frozen(x.detach()).loss.requires_grad
            grads = router.weight.grad.cpu(), x.grad.cpu()
            out.append((plain(routing), grads, still))
        return out

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for number, (top_k, factor) in enumerate(SETTINGS):
            found = [rank[number] for rank in results]
            expect_one_process(seed, w, top_k, factor, found)


def expect_one_process(seed, w, top_k, factor, found):
    """Compare the ranks' routings and gradients with those of one process."""
    weight = values(seed, 1, EXPERTS, WIDTH).requires_grad_()
    xs = [tokens_of(seed, r, 2 * WIDTH)[:, ::2].detach().requires_grad_() for r in range(w)]
    bias = values(seed, 2, EXPERTS) / 10
    routed = [route(x, weight, bias, top_k, factor) for x in xs]
    load = load_of([chosen for chosen, *_ in routed], EXPERTS)
    loss = balance([p for *_, p in routed], load)
    own = [(each[1] * values(seed, 9, *each[1].shape)).sum() for each in routed]
    right = torch.autograd.grad(sum(own) / w + 3 * loss, [weight, *xs])
    place = f"{w} ranks, top_k={top_k}, capacity factor {factor}: "
    for rank, (got, (_, of_x), still) in enumerate(found):
        chosen, weights, kept, _ = routed[rank]
        expect_equal(got["experts_NK"].dtype, torch.int64, what="the experts' dtype", rank=rank)
        what = f"{place}the experts"
        same = got["experts_NK"].tolist()
        expect_equal(same, chosen.tolist(), what=what, rank=rank, cause="wrong-experts")
        what = f"{place}the kept choices"
        same = got["kept_NK"].tolist()
        expect_equal(same, kept.tolist(), what=what, rank=rank, cause="wrong-drops")
        expect_close(got["weights_NK"], weights, what=f"{place}the weights", rank=rank, **EXACT)
        expect_equal(
            got["load_E"].tolist(),
            load.tolist(),
            what=f"{place}the load over the group, before drops",
            rank=rank,
            cause="wrong-load",
        )
        what = f"{place}w times the gradient of x"
        expect_close(of_x / w, right[1 + rank], what=what, rank=rank, **EXACT)
        expect_equal(still, False, what="whether a frozen router's loss needs a gradient")
    losses = torch.stack([got["loss"] for got, *_ in found])
    expect_close(losses.mean(), loss, what=f"{place}the mean of the ranks' losses", **EXACT)
    mean = sum(grads[0] for _, grads, _ in found) / w
    expect_close(mean, right[0], what=f"{place}the mean gradient of the weight", **EXACT)


def factors_of(routing) -> torch.Tensor:
    """What two features of ones were multiplied with, from probabilities of three experts."""
    p = torch.empty_like(routing.weights_NK)
    p.scatter_(1, routing.experts_NK, routing.weights_NK.detach())
    return (p[:, 1:] / p[:, :1]).log()


@exercise(
    "2.24", "virtual", asserts="jitter-uniform jitter-apart default-stays randomness resources"
)
def test_jitter_is_uniform_and_its_own(impl, run, seed):
    """Uniform on [1-ε, 1+ε) per element; independent on ranks and seeds; no default generator."""
    jitter, n = 0.25, 4000

    def body(ctx):
        torch.manual_seed(5)
        before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        drawn = []
        for number in (seed, seed + 1):
            router = impl.Router(2, 3, top_k=3, jitter=jitter, seed=number).double()
            router.weight.data.copy_(torch.tensor([[0, 0], [1, 0], [0, 1.0]]))
            x = torch.ones(n, 2, dtype=torch.float64)
            drawn += [factors_of(router(x)), factors_of(router(x))]
            still = factors_of(router.eval()(x))
        after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        same = torch.equal(before[0], after[0]) and before[1:] == after[1:]
        untouched = torch.equal(x, torch.ones(n, 2).double())
        return drawn, still, same, untouched

    results, streams = run(body, 2), []
    for rank, (drawn, still, same, untouched) in enumerate(results):
        text = "the state of the default generators stays"
        expect_equal(same, True, what=text, rank=rank, cause="default-generator")
        expect_equal(untouched, True, what="x stays", rank=rank, cause="input-changed")
        what = "factors in eval"
        expect_close(still, torch.ones_like(still), what=what, rank=rank, **EXACT)
        streams += [column for part in drawn for column in part.T]
    for factors in streams:
        low, high = factors.min().item(), factors.max().item()
        if low < 1 - jitter - 1e-9 or high > 1 + jitter + 1e-9:
            text = f"factors from {low:.4f} to {high:.4f} with a jitter of {jitter}"
            fail(text, cause="wrong-range")
        share = ((factors.sort().values - 1 + jitter) / (2 * jitter)).clamp(0, 1)
        apart = (share - (torch.arange(n) + 0.5) / n).abs().max().item()
        if apart > 3.5 / math.sqrt(n):  # Kolmogorov-Smirnov: by chance once in 2e10
            fail(f"the factors are not uniform: {apart:.3f} off", cause="not-uniform")
    together = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0).abs().max().item()
    if together > 7 / math.sqrt(n):  # seven standard deviations
        text = f"two streams of factors have a correlation of {together:.2f}: elements, forwards, "
        fail(f"{text}seeds and ranks need numbers of their own", cause="streams-alike")


@exercise("2.24", "virtual gloo", asserts="counted bias-moves state life nothing-sent")
def test_bias_moves_against_the_load(impl, run, seed):
    """By the rate, by the sign, once per update, from the load of the group in training."""

    def body(ctx):
        router = made(impl, seed, ctx, 2, 1.0)
        router.bias_E.zero_()
        fresh = impl.Router(WIDTH, EXPERTS)
        kinds = [(n, b.dtype, b.tolist()) for n, b in fresh.state_dict().items() if n != "weight"]
        x, out = tokens_of(seed, ctx.rank, WIDTH), []
        router.eval()(x)
        router.train()
        for _ in range(2):
            loads = [router(x + step).load_E.clone() for step in (0.0, 1.0)]
            counted = router.counted_E.clone()
            with ctx.region("update"):
                router.update_bias(0.25)
            bias = router.bias_E.clone(), router.counted_E.clone()
            router.update_bias()
            out.append((sum(loads), counted, *bias, router.bias_E.clone()))
        router.counted_E.copy_(torch.tensor([3, 3, 3, 2, 4]))
        router.update_bias()
        return kinds, out, router.bias_E - out[-1][-1]

    results = run(body, 3)
    for rank, (kinds, out, last) in enumerate(results):
        want = [
            ("bias_E", torch.float32, [0.0] * EXPERTS),
            ("counted_E", torch.int64, [0] * EXPERTS),
        ]
        expect_equal(sorted(kinds), want, what="the buffers of a new router", rank=rank)
        bias = torch.zeros(EXPERTS, dtype=torch.float64)
        for load, counted, moved, empty, same in out:
            what = "counted_E after two training forwards"
            got, want = counted.tolist(), load.tolist()
            expect_equal(got, want, what=what, rank=rank, cause="wrong-count")
            bias = bias - 0.25 * (load * EXPERTS - load.sum()).sign()
            expect_close(moved, bias, what="the bias after an update", rank=rank, **EXACT)
            what = "counted_E after an update"
            expect_equal(empty.tolist(), [0] * EXPERTS, what=what, rank=rank, cause="not-cleared")
            expect_close(same, bias, what="the bias after no load", rank=rank, **EXACT)
        want = torch.tensor([0, 0, 0, 1e-3, -1e-3]).double()
        expect_close(last, want, what="moved by the default rate", rank=rank, rtol=1e-6, atol=1e-9)
        results.logs[rank].select(region="update").sent_at_most(0, "an update sends nothing")
