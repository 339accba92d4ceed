"""Checks of exercise 2.14: the conjugate pair."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_close, fail, refusal, trace
from tests.phase2.parallel_values import strided, summed_again, values

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@exercise("2.14", "virtual gloo cuda")
def test_pair_is_conjugate(impl, run, seed, cases):
    """copy_to_ranks sums gradients, sum_over_ranks sums values; for any strides."""
    worlds = cases(3, 1, 2, 4)

    def body(ctx):
        out = []
        for change in (torch.clone, strided):
            term = change(values(seed, 20 + ctx.rank, 3, 5)).to(ctx.device).requires_grad_()
            z = impl.sum_over_ranks(term)
            if not isinstance(z, torch.Tensor):
                return [None] * 8
            same = change(values(seed, 30, 3, 5)).to(ctx.device)
            out += [z, *torch.autograd.grad(z, term, same)]
            x = change(values(seed, 1, 3, 5)).to(ctx.device).requires_grad_()
            y = impl.copy_to_ranks(x)
            weight = change(values(seed, 10 + ctx.rank, 3, 5)).to(ctx.device)
            out += [y, *torch.autograd.grad(y, x, weight)]
        return [t.detach().cpu() for t in out]

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        x, same = values(seed, 1, 3, 5), values(seed, 30, 3, 5)
        weights = [values(seed, 10 + rank, 3, 5) for rank in range(w)]
        terms = [values(seed, 20 + rank, 3, 5) for rank in range(w)]
        wanted = [
            ("sum_over_ranks(x)", sum(terms), {"contributions": terms}),
            ("gradient of sum_over_ranks(x)", same, {"rules": summed_again(same, w)}),
            ("copy_to_ranks(x)", x, {}),
            ("gradient of copy_to_ranks(x)", sum(weights), {"contributions": weights}),
        ]
        for rank, got in enumerate(results):
            for k, tensor in enumerate(got):
                name, want, known = wanted[k % 4]
                what = f"{name}, {'strided' if k > 3 else 'contiguous'}, {w} ranks"
                expect_close(tensor, want, what=what, rank=rank, **known, **EXACT)


@exercise("2.14", "virtual gloo")
def test_nothing_is_changed_in_place(impl, run, seed):
    """Inputs and incoming gradients keep their values; a residual beside the pair stays right."""

    def body(ctx):
        x = values(seed, ctx.rank, 4, 2).requires_grad_()
        incoming = torch.ones(4, 2, dtype=torch.float64)
        out = impl.sum_over_ranks(x)
        after = x.detach().clone()
        apart = isinstance(out, torch.Tensor) and out.data_ptr() != x.data_ptr()
        impl.copy_to_ranks(x).backward(incoming)
        after_backward = incoming.clone()
        z = values(seed, 40, 4, 2).requires_grad_()  # one gradient for both branches
        (z + impl.copy_to_ranks(z)).backward(values(seed, 50 + ctx.rank, 4, 2))
        return after, apart, after_backward, z.grad

    gradients = [values(seed, 50 + rank, 4, 2) for rank in range(3)]
    for rank, (after, apart, after_backward, residual) in enumerate(run(body, 3)):
        if not torch.equal(after, values(seed, rank, 4, 2)) or not apart:
            text = "sum_over_ranks changed its input, or returned the same memory"
            fail(f"{text}: reduce a copy", cause="input-changed", rank=rank)
        if not bool((after_backward == 1).all()):
            text = "backward of copy_to_ranks changed the gradient that was given to it"
            fail(f"{text}: autograd may use it elsewhere", cause="gradient-changed", rank=rank)
        want = sum(gradients) + gradients[rank]
        expect_close(residual, want, what="gradient of x + copy_to_ranks(x)", rank=rank, **EXACT)


@exercise("2.14", "virtual gloo")
def test_pair_sends_one_all_reduce_each(impl, run, seed):
    """copy_to_ranks sends in backward only, sum_over_ranks in forward only: 2(W-1)/W·N bytes."""
    n = 600

    def body(ctx):
        for name in ("copy_to_ranks", "sum_over_ranks"):
            x = torch.ones(n, dtype=torch.float64, requires_grad=True)
            with ctx.region(f"{name} forward"):
                y = getattr(impl, name)(x)
            with ctx.region(f"{name} backward"):
                y.backward(torch.ones(n, dtype=torch.float64))

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            for silent in ("copy_to_ranks forward", "sum_over_ranks backward"):
                log.select(region=silent).sent_at_most(0, f"nothing in {silent}")
            for loud in ("copy_to_ranks backward", "sum_over_ranks forward"):
                part = log.select(region=loud)
                part.sent_at_least(2 * (w - 1) / w * n * 8, f"2(W-1)/W·N in {loud}")
                part.sent_at_most(2 * (w - 1) / w * n * 8, f"2(W-1)/W·N in {loud}")


@exercise("2.14", "virtual")
def test_pair_in_a_subgroup(impl, run, seed):
    """Only the ranks of the group take part; the others are refused."""

    def body(ctx):
        group = dist.new_group([1, 3])
        x = values(seed, ctx.rank, 4).requires_grad_()
        if ctx.rank not in (1, 3):
            calls = impl.copy_to_ranks, impl.sum_over_ranks
            return [refusal(call, x, group) for call in calls]
        y = impl.sum_over_ranks(x, group)
        impl.copy_to_ranks(x, group).sum().backward()
        return [y.detach(), x.grad]

    results = run(body, 4)
    for rank in (0, 2):
        for text in results[rank]:
            if text.startswith("!"):
                message = f"a rank outside of the group: expected a ValueError, but {text[1:]}"
                fail(message, cause="accepted", rank=rank)
    for rank in (1, 3):
        terms = [values(seed, r, 4) for r in (1, 3)]
        what = "over the group of ranks 1 and 3"
        expect_close(results[rank][0], sum(terms), what=f"sum {what}", rank=rank, **EXACT)
        want = torch.full((4,), 2.0, dtype=torch.float64)
        expect_close(results[rank][1], want, what=f"gradient {what}", rank=rank, **EXACT)


@trace("2.14")
def trace_pair(impl):
    """Two steps of a function of which each rank computes one term."""

    def body(ctx):
        weight = torch.ones(512, 512, requires_grad=True)
        x = torch.ones(512, 512, requires_grad=True)
        for step in ctx.steps(3):
            with ctx.region(f"step {step}"):
                term = torch.sin(impl.copy_to_ranks(x) @ weight)
                impl.sum_over_ranks(term).square().mean().backward()

    return body
