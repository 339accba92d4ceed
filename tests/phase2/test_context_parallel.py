"""Checks of exercise 2.22: attention around a ring, its values."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.explain.case import Case, Diagnosis
from distlab.grading import exercise, expect_close, expect_equal, trace
from tests.phase2.attention import NAMES, at, drawn, one_process, zigzag
from tests.phase2.parallel_values import values

EXACT = {"rtol": 1e-9, "atol": 1e-10}
DOCUMENTS = {0.7: [5, 16, 1, 7], 1.0: [23], 0.0: [12, 12]}  # by their scale


def step(impl, q, k, v, grad, *more, **named):
    """Result and gradients of ``ring_attention``, detached."""
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    result = impl.ring_attention(*given, *more, **named)
    found = [result, *torch.autograd.grad(result, given, grad)]
    return [t.detach().cpu() for t in found]


def compare(got, want, positions, what: str, rank: int, unscaled=None, **options) -> None:
    """The rows of real positions of result and gradients against those of one process.

    ``unscaled`` is the result if nobody had given a scale.
    """
    real = positions >= 0
    for name, mine, whole in zip(NAMES, got, want, strict=True):
        right = whole[:, :, positions[real]].to(mine.dtype)
        rules = [own_block_only] if name == NAMES[0] else []
        if rules and unscaled is not None:
            rules.append(default_scale(unscaled[:, :, positions[real]]))
        where = f"{name}, {what}"
        expect_close(mine[:, :, real], right, what=where, rank=rank, rules=rules, **options)


def own_block_only(case: Case) -> Diagnosis | None:
    """A result that is not finite: a query without any key."""
    if torch.isfinite(case.got).all():
        return None
    return Diagnosis("no-key", "some queries have no finite result: did each see its own key?")


def default_scale(unscaled: torch.Tensor):
    """A rule: the result is that of the scale 1/√d, and another one was given."""

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(unscaled):
            return None
        return Diagnosis("default-scale", "the scale was 1/√d, which holds only if none is given")

    return rule


@exercise("2.22", "virtual gloo cuda", nccl=True, asserts="result grouped")
def test_ring_equals_one_process(impl, run, seed, cases):
    """Result and gradients of one document over the ranks, two heads for each head of k and v."""
    worlds = cases(3, 2, 1, 4)

    def body(ctx):
        rows = zigzag([LONG], ctx.rank, ctx.world_size)
        parts = [at(t, rows).to(ctx.device) for t in drawn(seed, LONG)]
        return step(impl, *parts)

    whole = drawn(seed, LONG)
    want = one_process(*whole, [LONG])
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            compare(got, want, zigzag([LONG], rank, w), f"{w} ranks", rank, **EXACT)


LONG = 24  # divides by 2, 4, 6 and 8


@exercise("2.22", "virtual", asserts="result positions documents scale alone")
def test_documents_do_not_see_each_other(impl, run, seed, cases):
    """Documents of different lengths, one of a single position, padding; a scale, also of 0."""
    worlds = cases(3, 1, 2, 4)

    def body(ctx):
        found = []
        for scale, lengths in DOCUMENTS.items():
            rows = zigzag(lengths, ctx.rank, ctx.world_size)
            q, k, v, grad = (at(t, rows) for t in drawn(seed, sum(lengths), 3, 1))
            q, k, v = (t + 3.0 * (rows < 0)[:, None] for t in (q, k, v))  # padding has values
            found.append(step(impl, q, k, v, grad, tuple(lengths), scale=scale))
        return found

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, each in enumerate(results):
            for (scale, lengths), got in zip(DOCUMENTS.items(), each, strict=True):
                whole, rows = drawn(seed, sum(lengths), 3, 1), zigzag(lengths, rank, w)
                want, unscaled = (one_process(*whole, lengths, s) for s in (scale, None))
                what = f"documents of {lengths} positions, scale={scale}, {w} ranks"
                compare(got, want, rows, what, rank, unscaled[0], **EXACT)


@exercise("2.22", "virtual gloo", asserts="group layout life")
def test_rings_in_groups(impl, run, seed):
    """Groups of ranks 3, 1 and 2, 0 at once: strided views, used twice, two backwards."""

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [2, 0])][even]
        length = 8 + 4 * even
        rows = zigzag([length], int(ctx.rank > 1), 2)
        fused = torch.cat([at(t, rows) for t in drawn(seed, length, 2, 2)], -1)
        fused = fused.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        kept = fused.detach().clone()
        q, k, v, grad = fused.chunk(4, -1)
        out = impl.ring_attention(q, k, v, group=mine)
        twice = out + impl.ring_attention(2 * q, k, v, [length], group=mine)
        twice.backward(grad.detach(), retain_graph=True)
        twice.backward(grad.detach())
        if not torch.equal(kept, fused.detach()):
            return "changed"
        return [twice.detach(), *fused.grad.chunk(4, -1)[:3]]

    for rank, got in enumerate(run(body, 4)):
        expect_equal(got == "changed", False, what="a changed input", rank=rank, cause="input")
        length = 12 if rank in (0, 2) else 8
        q, k, v, grad = drawn(seed, length, 2, 2)
        once, more = (one_process(a, k, v, grad, [length]) for a in (q, 2 * q))
        want = [once[0] + more[0], 2 * once[1] + 4 * more[1]]
        want += [2 * (a + b) for a, b in zip(once[2:], more[2:], strict=True)]
        rows = zigzag([length], int(rank > 1), 2)
        compare(got, want, rows, "in a group of two ranks", rank, **EXACT)


DTYPES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}  # rounding of one


@exercise("2.22", "virtual", asserts="dtype wide")
def test_16_bits_are_summed_in_float32(impl, run, seed):
    """Results and gradients have the arguments' dtype, and the error of one rounding, under
    autocast too."""

    def body(ctx):
        rows, found = zigzag([96], ctx.rank, ctx.world_size), []
        for dtype in DTYPES:
            parts = [at(t, rows).to(dtype) for t in drawn(seed, 96, 2, 1)]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                found.append(step(impl, *parts))
        return found

    for rank, each in enumerate(run(body, 4)):
        for (dtype, rounding), got in zip(DTYPES.items(), each, strict=True):
            want = one_process(*(t.to(dtype) for t in drawn(seed, 96, 2, 1)), [96])
            kinds = [t.dtype for t in got]
            expect_equal(kinds, [dtype] * 4, what="dtypes of result and gradients", rank=rank)
            rows = zigzag([96], rank, 4)
            for name, mine, whole in zip(NAMES, got, want, strict=True):
                # A gradient also has the rounding of the result: D is grad·out, summed. The
                # largest such error of 800 draws was 3.5 roundings
                near = rounding * (8 if name != NAMES[0] else 0.25)
                right, what = whole[:, :, rows], f"{name} in {dtype}"
                expect_close(mine.double(), right, what=what, rank=rank, rtol=rounding, atol=near)


@exercise("2.22", "virtual", asserts="needed parameters")
def test_only_what_needs_gradients_gets_them(impl, run, seed):
    """Only q, only k, only v, or nothing needs gradients; without them nothing is kept."""
    which = [(True, False, False), (False, True, False), (False, False, True)]

    def body(ctx):
        rows, found = zigzag([12], ctx.rank, ctx.world_size), []
        q, k, v, grad = (at(t, rows) for t in drawn(seed, 12))
        for needs in which:
            given = [t.clone().requires_grad_(n) for t, n in zip((q, k, v), needs, strict=True)]
            impl.ring_attention(*given).backward(grad)
            found.append([t.grad for t in given])
        with torch.no_grad():
            quiet = impl.ring_attention(q.requires_grad_(), k, v)
        return found, quiet, quiet.requires_grad

    want = one_process(*drawn(seed, 12), [12])
    for rank, (found, quiet, tracked) in enumerate(run(body, 3)):
        rows = zigzag([12], rank, 3)
        expect_equal(tracked, False, what="requires_grad under no_grad", rank=rank)
        expect_close(quiet, want[0][:, :, rows], what="result under no_grad", rank=rank, **EXACT)
        for needs, got in zip(which, found, strict=True):
            for name, need, mine, whole in zip(NAMES[1:], needs, got, want[1:], strict=True):
                what = f"{name}, if {needs} need gradients"
                if need:
                    expect_close(mine, whole[:, :, rows], what=what, rank=rank, **EXACT)
                else:
                    expect_equal(mine, None, what=what, rank=rank, cause="frozen")


@trace("2.22")
def trace_ring(impl):
    """Two steps of ring attention: 4 heads of 32 features, 1,024 positions."""

    def body(ctx):
        t = 1024 // ctx.world_size
        q, k, v = (values(0, n, 1, 4, t, 32).float().requires_grad_() for n in range(3))
        for number in ctx.steps(3):
            with ctx.region(f"step {number}"):
                impl.ring_attention(q, k, v).sum().backward()

    return body
