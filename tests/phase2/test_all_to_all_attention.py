"""Checks of exercise 2.23: attention with heads exchanged for positions."""

from __future__ import annotations

import torch
import torch.distributed as dist

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
from tests.phase2.attention import NAMES, drawn, one_process
from tests.phase2.parallel_values import values

EXACT = {"rtol": 1e-9, "atol": 1e-10}
LENGTH = 12  # divides by 1, 2, 3 and 4
HEADS = 12, 6


def part(t: torch.Tensor, rank: int, world_size: int, dim: int = 2) -> torch.Tensor:
    """A rank's positions, or its heads in dimension 1."""
    return t.chunk(world_size, dim)[rank]


def compare(got, want, rank: int, world_size: int, what: str) -> None:
    """Result and gradients of a rank's positions against those of one process."""
    for name, mine, whole in zip(NAMES, got, want, strict=True):
        right = part(whole, rank, world_size)
        expect_close(mine, right, what=f"{name}, {what}", rank=rank, **EXACT)


def two_tensors(seed: int, first: int = 0):
    """Tensors of 12 and of 6 heads at all positions."""
    return [values(seed, first + n, 2, h, LENGTH, 5) for n, h in enumerate(HEADS)]


@exercise("2.23", "virtual gloo cuda", nccl=True, asserts="exchange back layout alone")
def test_heads_are_exchanged_for_positions(impl, run, seed, cases):
    """All positions of the own heads, of several tensors at once; and back; with gradients."""
    worlds = cases(3, 2, 1)

    def body(ctx):
        w, rank = ctx.world_size, ctx.rank
        two, grads = two_tensors(seed), two_tensors(seed, 10)
        strided = [part(t, rank, w).transpose(0, 3).contiguous().transpose(0, 3) for t in two]
        mine = [t.to(ctx.device).requires_grad_() for t in strided]
        there = impl.heads_for_positions(mine)
        of_there = [part(g, rank, w, 1).to(ctx.device) for g in grads]
        found = [*there, *torch.autograd.grad(there, mine, of_there)]
        x = part(two[0].mT.contiguous().mT, rank, w, 1).to(ctx.device).requires_grad_()
        home = impl.positions_for_heads(x)
        found += [home, *torch.autograd.grad(home, x, part(grads[0], rank, w).to(ctx.device))]
        return [t.detach().cpu() for t in found]

    names = ["12 heads", "6 heads", "gradient of 12 heads", "gradient of 6 heads"]
    names += ["positions of all heads", "gradient of these"]
    two, grads = two_tensors(seed), two_tensors(seed, 10)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            want = [part(t, rank, w, 1) for t in two] + [part(t, rank, w) for t in grads]
            want += [part(two[0], rank, w), part(grads[0], rank, w, 1)]
            for name, mine, right in zip(names, got, want, strict=True):
                expect_close(mine, right, what=f"{name}, {w} ranks", rank=rank, **EXACT)


@exercise("2.23", "virtual gloo cuda", nccl=True, asserts="result grouped causal alone")
def test_all_to_all_equals_one_process(impl, run, seed, cases):
    """Result and gradients of causal attention, two heads of q for each head of k and v."""
    worlds = cases(3, 2, 1)

    def body(ctx):
        whole = drawn(seed, LENGTH, *HEADS)
        q, k, v, grad = (part(t, ctx.rank, ctx.world_size).to(ctx.device) for t in whole)
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        result = impl.all_to_all_attention(*given)
        found = [result, *torch.autograd.grad(result, given, grad)]
        return [t.detach().cpu() for t in found]

    want = one_process(*drawn(seed, LENGTH, *HEADS), [LENGTH])
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            compare(got, want, rank, w, f"{w} ranks")


@exercise("2.23", "virtual gloo", asserts="any group life parameters dtype")
def test_any_attention_in_groups(impl, run, seed):
    """Groups of ranks 3, 1 and 2, 0 at once, own attention, two backwards, k frozen; dtypes."""
    documents = [5, 7]

    def body(ctx):
        even, place, shapes = ctx.rank in (0, 2), int(ctx.rank > 1), []
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [2, 0])][even]

        def attention(*whole):
            shapes.append([tuple(t.shape) for t in whole])
            parts = zip(*(t.split(documents, 2) for t in whole), strict=True)
            attend = torch.nn.functional.scaled_dot_product_attention
            return torch.cat([attend(*each, is_causal=True, enable_gqa=True) for each in parts], 2)

        q, k, v, grad = (part(t, place, 2) for t in drawn(seed + even, LENGTH, 4, 2))
        q, v = (t.detach().requires_grad_() for t in (q, v))
        result = impl.all_to_all_attention(q, k, v, attention, mine)
        for _ in range(2):
            result.backward(grad, retain_graph=True)
        numbers = torch.arange(48).view(1, 4, 3, 4) + 100 * place
        kept = []
        for dtype in (torch.bfloat16, torch.int64):
            (there,) = impl.heads_for_positions([numbers.to(dtype)], group=mine)
            kept.append((there, impl.positions_for_heads(there, group=mine)))
        return [result.detach(), q.grad, v.grad], shapes, k.grad, kept

    for rank, (found, shapes, of_k, kept) in enumerate(run(body, 4)):
        even, place = rank in (0, 2), int(rank > 1)
        expect_equal(of_k, None, what="the gradient of a frozen k", rank=rank, cause="frozen")
        right = [[(2, heads // 2, LENGTH, 6) for heads in (4, 2, 2)]]
        expect_equal(shapes, right, what="shapes that attention got", rank=rank, cause="shapes")
        result, of_q, _, of_v = one_process(*drawn(seed + even, LENGTH, 4, 2), documents)
        want = zip((*NAMES[:2], NAMES[3]), found, (result, 2 * of_q, 2 * of_v), strict=True)
        for name, mine, whole in want:
            expect_close(mine, part(whole, place, 2), what=name, rank=rank, **EXACT)
        every = [torch.arange(48).view(1, 4, 3, 4) + 100 * other for other in range(2)]
        heads = part(torch.cat(every, 2), place, 2, 1)
        for dtype, pair in zip((torch.bfloat16, torch.int64), kept, strict=True):
            for name, got, right in zip(
                ("there", "back"), pair, (heads, every[place]), strict=True
            ):
                expect_equal(got.dtype, dtype, what=f"the dtype {name}", rank=rank, cause="dtype")
                what = f"numbers in {dtype}, {name}"
                expect_close(got.double(), right.to(dtype).double(), what=what, rank=rank)


@exercise("2.23", "virtual gloo", asserts="bytes cost")
def test_two_all_to_alls_each_way(impl, run, seed):
    """Two all-to-alls forward, two backward: (W-1)/W·B·t·d·(2H + 2G) numbers each way."""

    def body(ctx):
        whole = drawn(seed, LENGTH, *HEADS)
        q, k, v, grad = (part(t, ctx.rank, ctx.world_size) for t in whole)
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        with ctx.region("forward"):
            result = impl.all_to_all_attention(*given)
        with ctx.region("backward"):
            result.backward(grad)

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            nbytes = (w - 1) / w * 2 * LENGTH / w * 6 * 2 * sum(HEADS) * 8
            for region in ("forward", "backward"):
                found, formula = log.select(region=region), "(W-1)/W·B·t·d·(2H + 2G) numbers"
                found.sent_at_most(nbytes, f"{formula}, {region}")
                found.sent_at_least(nbytes, f"{formula}, {region}")
                if [event.op for event in found.events] != ["all_to_all"] * 2:
                    text = f"{region}: {[event.op for event in found.events]}; two all-to-alls, "
                    fail(text + "one each way, are enough", cause="message-count", rank=log.rank)


MACHINES = [
    {"flops": 7e14, "alpha": alpha, "beta": beta, "ranks": ranks, "kv_heads": groups}
    for alpha, beta in ((0.0, 2e-12), (0.0, 2e-11), (1e-5, 2e-11), (1e-2, 2e-12))
    for ranks, groups in ((8, 32), (8, 4), (2, 32), (3, 16), (64, 8), (1, 32))
]


def near(got: float, want: float, what: str, machine, cause: str = "formula") -> None:
    """Equal but for rounding."""
    if abs(got - want) > 1e-9 * max(abs(want), 1e-12):
        fail(f"{what} with {machine}: expected {want:.9g}, got {got:.9g}", cause=cause)


@exercise("2.23", "virtual", asserts="work times crossing")
def test_seconds_and_crossing(impl, run):
    """Both times by their formulas; the crossing is where they are equal, or 0."""

    def body(ctx):
        found = []
        for machine in MACHINES:
            layer = impl.Layer(batch=3, heads=32, features=128, itemsize=2, **machine)
            at = impl.crossing(layer)
            lengths = (
                [4096, 0.99 * at, 1.01 * at, at] if at else [4096, *(2**n for n in range(8, 26))]
            )
            both = [
                (impl.ring_seconds(layer, n), impl.all_to_all_seconds(layer, n)) for n in lengths
            ]
            found.append((impl.work_seconds(layer, 4096), at, both))
        return found

    for machine, (work, at, both) in zip(MACHINES, run(body, 1)[0], strict=True):
        w, groups, alpha, beta = (machine[n] for n in ("ranks", "kv_heads", "alpha", "beta"))
        right = 4 * 128 * 3 * 32 * 4096**2 / 2 / w / machine["flops"]
        near(work, right, "work_seconds of 4,096 positions", machine)
        message = alpha + 2 * 3 * groups * 4096 / w * 128 * 2 * beta
        ring = (w - 1) * max(right / w, message) + right / w
        near(both[0][0], ring, "ring_seconds of 4,096 positions", machine)
        sent = (w - 1) / w * 3 * 4096 / w * 128 * (64 + 2 * groups) * 2 * beta
        want = right + 2 * (w - 1) * alpha + sent
        near(both[0][1], want, "all_to_all_seconds of 4,096 positions", machine)
        if not alpha:
            linear = 2 * beta * machine["flops"] * (groups * (w - 1) - 32) / 32
            near(at, max(linear, 0.0), "crossing", machine)
        before, after = both[1:2] if at else [], both[2:3] if at else both[1:]
        if at:
            what = "ring_seconds at the crossing, where both are equal,"
            near(*both[3], what, machine, cause="crossing")
        if any(ring <= other for ring, other in before):
            text = f"{machine}: the ring is not slower just before {at:,.0f} positions"
            fail(text, cause="crossing")
        if any(ring > other * (1 + 1e-12) for ring, other in after):
            text = f"{machine}: the ring is slower behind the crossing, {at:,.0f} positions"
            fail(text, cause="crossing")


@exercise("2.23", "virtual", asserts="resources")
def test_nothing_is_left_in_memory(impl, run, seed):
    """After backward there are the gradients, and nothing else."""

    def body(ctx):
        q, k, v, grad = (t.clone() for t in drawn(seed, 8, 4, 4, 4, 64))
        given = [t.requires_grad_() for t in (q, k, v)]
        with PeakMemory() as memory:
            impl.all_to_all_attention(*given).backward(grad)
            return memory.current - storage_bytes([t.grad for t in given])

    for rank, left in enumerate(run(body, 2)):
        if left > 1000:
            text = f"after backward rank {rank} has {left:,} bytes more than the gradients"
            fail(text, cause="too-much-memory", rank=rank)


@exercise("2.23", "virtual", asserts="divides outsider refusals life")
def test_heads_that_do_not_divide_are_refused(impl, run):
    """Heads or positions that W does not divide, a foreign process: ValueError, nothing sent."""
    x = torch.ones(1, 6, 4, 8)
    calls = {
        "8 heads of q on 3 ranks": ("all_to_all_attention", (x.repeat(1, 2, 1, 1)[:, :8], x, x)),
        "4 heads of k on 3 ranks": ("all_to_all_attention", (x, x[:, :4], x)),
        "2 heads of v on 3 ranks": ("all_to_all_attention", (x, x, x[:, :2])),
        "5 heads on 3 ranks": ("heads_for_positions", ([x, x[:, :5]],)),
        "4 positions on 3 ranks": ("positions_for_heads", (x,)),
    }
    outside = {
        "all_to_all_attention": (x, x, x),
        "heads_for_positions": ([x],),
        "positions_for_heads": (x,),
    }

    def body(ctx):
        group = dist.new_group([0, 1])
        found = [refusal(getattr(impl, name), *given) for name, given in calls.values()]
        if ctx.rank == 2:
            named = outside.items()
            found += [refusal(getattr(impl, name), *given, group=group) for name, given in named]
        return found

    results = run(body, 3)
    expect_refusals(results[2][len(calls) :], [f"{name} outside" for name in outside], rank=2)
    results[2] = results[2][: len(calls)]
    expect_refused(results, [*calls])

    def again(ctx):
        refusal(impl.positions_for_heads, x)
        return impl.all_to_all_attention(x, x, x)

    for rank, got in enumerate(run(again, 3)):
        expect_close(got, x, what="the result after a refusal, of ones", rank=rank)


@trace("2.23")
def trace_all_to_all(impl):
    """Two steps of all-to-all attention: 4 heads of 32 features, 1,024 positions."""

    def body(ctx):
        t = 1024 // ctx.world_size
        q, k, v = (values(0, n, 1, 4, t, 32).float().requires_grad_() for n in range(3))
        for number in ctx.steps(3):
            with ctx.region(f"step {number}"):
                impl.all_to_all_attention(q, k, v).sum().backward()

    return body
