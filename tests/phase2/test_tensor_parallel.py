"""Checks of exercise 2.14: the conjugate pair."""

from __future__ import annotations

import weakref
from itertools import product

import torch
import torch.distributed as dist

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, SavedActivations
from tests.phase2.parallel_values import strided, summed_again, values

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@exercise("2.14", "virtual gloo cuda", asserts="copy sum copy-gradient sum-gradient layout")
def test_pair_is_conjugate(impl, run, seed, cases):
    """copy_to_ranks sums gradients, sum_over_ranks sums values; for any strides."""
    worlds = cases(3, 1, 2, 4)

    def body(ctx):
        out = []
        for turn in range(2):  # every second rank has other strides
            change, drawn = (torch.clone, strided)[(turn + ctx.rank) % 2], seed + 100 * turn
            term = change(values(drawn, 20 + ctx.rank, 3, 5)).to(ctx.device).requires_grad_()
            z = impl.sum_over_ranks(term)
            if not isinstance(z, torch.Tensor):
                return [None] * 8
            same = change(values(drawn, 30, 3, 5)).to(ctx.device)
            out += [z, *torch.autograd.grad(z, term, same)]
            x = change(values(drawn, 1, 3, 5)).to(ctx.device).requires_grad_()
            y = impl.copy_to_ranks(x)
            weight = change(values(drawn, 10 + ctx.rank, 3, 5)).to(ctx.device)
            out += [y, *torch.autograd.grad(y, x, weight)]
        return [t.detach().cpu() for t in out]

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        wanted = []
        for drawn in (seed, seed + 100):
            x, same = values(drawn, 1, 3, 5), values(drawn, 30, 3, 5)
            weights = [values(drawn, 10 + rank, 3, 5) for rank in range(w)]
            terms = [values(drawn, 20 + rank, 3, 5) for rank in range(w)]
            wanted += [
                ("sum_over_ranks(x)", sum(terms), {"contributions": terms}),
                ("gradient of sum_over_ranks(x)", same, {"rules": summed_again(same, w)}),
                ("copy_to_ranks(x)", x, {}),
                ("gradient of copy_to_ranks(x)", sum(weights), {"contributions": weights}),
            ]
        for rank, got in enumerate(results):
            for k, tensor in enumerate(got):
                name, want, known = wanted[k]
                layout = "strided" if (k // 4 + rank) % 2 else "contiguous"
                what = f"{name}, {layout} on this rank, {w} ranks"
                expect_close(tensor, want, what=what, rank=rank, **known, **EXACT)


@exercise("2.14", "virtual gloo", asserts="gradient-kept input-kept new-tensor copy-gradient")
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


@exercise("2.14", "virtual gloo", asserts="copy-bytes sum-bytes cost")
def test_pair_sends_one_all_reduce_each(impl, run, seed):
    """copy_to_ranks sends in backward only, sum_over_ranks in forward only: 2(W-1)/W·N bytes."""
    n, dtypes = 600, (torch.float64, torch.bfloat16)

    def body(ctx):
        for name, dtype in product(("copy_to_ranks", "sum_over_ranks"), dtypes):
            x = torch.ones(n, dtype=dtype, requires_grad=True)
            with ctx.region(f"{name} forward, {dtype}"):
                y = getattr(impl, name)(x)
            with ctx.region(f"{name} backward, {dtype}"):
                y.backward(torch.ones(n, dtype=dtype))

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            for dtype in dtypes:
                for silent in ("copy_to_ranks forward", "sum_over_ranks backward"):
                    part = log.select(region=f"{silent}, {dtype}")
                    part.sent_at_most(0, f"nothing in {silent}")
                for loud in ("copy_to_ranks backward", "sum_over_ranks forward"):
                    part = log.select(region=f"{loud}, {dtype}")
                    formula = f"2(W-1)/W·N numbers of {dtype} in {loud}"
                    part.sent_at_least(2 * (w - 1) / w * n * dtype.itemsize, formula)
                    part.sent_at_most(2 * (w - 1) / w * n * dtype.itemsize, formula)


SHAPES = {
    "contiguous": lambda x: x,
    "transposed": torch.t,
    "every second column": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 4),
    "one element": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def whole_numbers(seed: int, salt: int, kind: torch.dtype, shape: str) -> torch.Tensor:
    """Small integers, whose sums are exact in every dtype, and a zero; with strides."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    numbers = torch.randint(1, 9, (3, 4), generator=generator)
    return SHAPES[shape](torch.where(numbers == 8, 0, numbers).to(kind))


@exercise("2.14", "virtual", asserts="copy-gradient sum any-kind new-tensor group dtype layout")
def test_pair_of_every_kind_in_groups(impl, run, seed):
    """Any dtype, shape and strides, in two groups at once: new tensors of the same dtype."""

    def body(ctx):
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][ctx.rank in (0, 2)]
        if ctx.rank in (0, 2):  # these do other things meanwhile
            impl.sum_over_ranks(torch.ones(7), mine)
        out = []
        for number, (kind, shape) in enumerate((k, s) for k in KINDS for s in SHAPES):
            x = whole_numbers(seed, 100 * ctx.rank + number, kind, shape).requires_grad_()
            total = impl.sum_over_ranks(x, mine)
            if not isinstance(total, torch.Tensor):
                return [(total, x, x, x, False)]
            grad = torch.autograd.grad(total, x, whole_numbers(seed, number, kind, shape))[0]
            same = impl.copy_to_ranks(x, mine)
            mask = whole_numbers(seed, 100 * ctx.rank + number, kind, shape)
            copied = torch.autograd.grad(same, x, mask)[0]
            total = total.detach()
            out.append((total.clone(), grad, same.detach(), copied, total.is_contiguous()))
        other = [dist.new_group([2]), dist.new_group([3, 0, 1])][ctx.rank != 2]
        x = torch.full((2, 3), 1.0 + ctx.rank, requires_grad=True)
        total = impl.sum_over_ranks(x, other)
        copied = torch.autograd.grad(impl.copy_to_ranks(x, other), x, x.detach())[0]
        apart = isinstance(total, torch.Tensor) and total.data_ptr() != x.data_ptr()
        out.append((total.detach(), copied, apart))
        bytes_ = torch.tensor([1 + ctx.rank, 7], dtype=torch.uint8)
        nan = torch.tensor([torch.nan if ctx.rank < 2 else 1.0, torch.inf])
        out.append([impl.sum_over_ranks(each, mine) for each in (bytes_, nan)])
        large = torch.tensor([2**53 + 1 + ctx.rank])
        small = torch.full((3,), 100 + ctx.rank, dtype=torch.int32)
        copied = impl.copy_to_ranks(small, mine)
        return [*out, (impl.sum_over_ranks(large, mine), impl.sum_over_ranks(small, mine), copied)]

    for rank, results in enumerate(run(body, 4)):
        mine = (0, 2) if rank in (0, 2) else (1, 3)
        for number, (kind, shape) in enumerate((k, s) for k in KINDS for s in SHAPES):
            terms = [whole_numbers(seed, 100 * r + number, kind, shape) for r in mine]
            same = whole_numbers(seed, number, kind, shape)
            what = f"in the group of ranks {mine}, {kind}, {shape}: "
            total, grad, copied, copied_grad, contiguous = results[number]
            for got, name, want in (
                (total, "sum_over_ranks(x)", sum(terms)),
                (grad, "gradient of sum_over_ranks(x)", same),
                (copied, "copy_to_ranks(x)", terms[mine.index(rank)]),
                (copied_grad, "gradient of copy_to_ranks(x)", sum(terms)),
            ):
                expect_close(got, want, what=what + name, rank=rank, rtol=0.0, atol=0.0)
            if not contiguous:
                text = f"{what}sum_over_ranks returned a tensor that is not contiguous"
                fail(text, cause="layout", rank=rank)
        large = torch.tensor([2 * (2**53 + 1) + sum(mine)])
        small = torch.full((3,), 200 + sum(mine), dtype=torch.int32)
        copied = torch.full((3,), 100 + rank, dtype=torch.int32)
        others = [2] if rank == 2 else [0, 1, 3]
        total, of_copy, apart = results[-3]
        want = torch.full((2, 3), sum(1.0 + r for r in others))
        expect_close(total, want, what=f"the sum over the ranks {others}", rank=rank)
        what = f"the gradient of copy_to_ranks over the ranks {others}"
        expect_close(of_copy, want, what=what, rank=rank)
        if not apart:
            text = f"sum_over_ranks over {len(others)} rank(s) returned its input's memory: a new "
            fail(text + "tensor is promised", cause="input-changed", rank=rank)
        bytes_, nan = results[-2]
        want = torch.tensor([2 + sum(mine), 14], dtype=torch.uint8)
        expect_close(bytes_, want, what="the sum of uint8", rank=rank)
        odd = nan.isnan().tolist(), nan.isinf().tolist()
        what = "where a sum of (NaN, infinity) and (1, infinity) is NaN, and where infinite"
        expect_equal(odd, ([True, False], [False, True]), what=what, rank=rank)
        names = "the sum of int64 above 2^53", "the sum of int32", "copy_to_ranks of int32"
        for got, name, want in zip(results[-1], names, (large, small, copied), strict=True):
            expect_close(got, want, what=name, rank=rank)


def later_backward(case: Case) -> Diagnosis:
    """A rule: the first backward was right."""
    text = "the first backward through this graph was right, a later one is not: it must find all "
    return Diagnosis("backward-once", f"{text}that it needs again, also the group")


@exercise("2.14", "virtual", asserts="kept-nothing often life resources")
def test_pair_keeps_nothing_and_repeats(impl, run, seed):
    """Neither keeps a tensor for backward; a graph may hold both twice and be used three times."""

    def body(ctx):
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][ctx.rank in (0, 2)]
        with SavedActivations() as saved:
            x = values(seed, ctx.rank, 4, 2).requires_grad_()
            kept = []
            for function in (impl.sum_over_ranks, impl.copy_to_ranks):
                with PeakMemory() as memory:
                    inner = x.clone()
                    alive, result = weakref.ref(inner), 2 * function(inner, mine)
                    del inner
                    beside = memory.current - result.untyped_storage().nbytes()
                kept += [alive() is not None, beside > 0]
                del result
            total = impl.sum_over_ranks(x.clone(), mine)
            parts = [impl.copy_to_ranks(total, mine) for _ in range(2)]
            z = impl.copy_to_ranks(sum(parts), mine)
        found = [z.detach()]
        for _ in range(3):
            z.backward(torch.full((4, 2), 1.0 + ctx.rank).double(), retain_graph=True)
            found.append(x.grad.clone())
        return saved.bytes, kept, found

    for rank, (saved, kept, (z, first, _, third)) in enumerate(run(body, 4)):
        mine = (0, 2) if rank in (0, 2) else (1, 3)
        total = sum(values(seed, r, 4, 2) for r in mine)
        if saved or any(kept):
            text = "a tensor is kept for backward, which needs none of the values"
            fail(f"{text} (rank {rank})", cause="too-much-memory", rank=rank)
        expect_close(z, 2 * total, what="twice the sum", rank=rank, **EXACT)
        want = torch.full((4, 2), 2.0 * 2 * (2 + sum(mine)), dtype=torch.float64)
        what = f"gradient through copy(copy(s) + copy(s)) in the group {mine}"
        expect_close(first, want, what=what, rank=rank, **EXACT)
        what = f"{what} after three backwards"
        expect_close(third, 3 * want, what=what, rank=rank, rules=(later_backward,), **EXACT)


@exercise("2.14", "virtual", asserts="outsider refusals")
def test_pair_refuses_outsiders(impl, run, seed):
    """A process that is not in the group is refused, with and without gradients."""

    def body(ctx):
        group = dist.new_group([1, 3])
        if ctx.rank in (1, 3):
            return []
        x = values(seed, ctx.rank, 4)
        calls = impl.copy_to_ranks, impl.sum_over_ranks
        return [refusal(f, y, group) for f in calls for y in (x, x.clone().requires_grad_())]

    results = run(body, 4)
    calls = [f"{name} outside of the group" for name in ("copy", "copy", "sum", "sum")]
    for rank in (0, 2):
        expect_refusals(results[rank], calls, rank=rank)


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
