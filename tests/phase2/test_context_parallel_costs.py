"""Checks of exercise 2.22: work, messages, overlap and memory of attention around a ring."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_close, expect_refusals, expect_refused, fail, refusal
from distlab.observe.memory import PeakMemory, storage_bytes
from distlab.virtual import load_cluster
from tests.phase2.attention import Work, at, drawn, one_process, zigzag
from tests.phase2.parallel_values import values

BATCH, HEADS, GROUPS, WIDTH = 2, 4, 2, 6  # as in ``drawn``
PAIR = 2 * BATCH * HEADS * WIDTH  # FLOPs of one product of two positions


@exercise("2.22", "virtual", asserts="work cost")
def test_all_ranks_multiply_equally_much(impl, run, seed, cases):
    """Counted work: the slowest rank has at most 1.1 of the mean, and nothing hidden is used."""
    documents, worlds = [10, 31], cases(3, 2, 4)

    def body(ctx):
        rows = zigzag(documents, ctx.rank, ctx.world_size)
        *given, grad = (at(t, rows) for t in drawn(seed, sum(documents)))
        q, k, v = (t.requires_grad_() for t in given)
        with Work() as forward:
            out = impl.ring_attention(q, k, v, documents)
        with Work() as backward:
            out.backward(grad)
        return forward.flops, backward.flops

    for w, results in zip(worlds, run.worlds(body, worlds, seeds=1), strict=True):  # counts alone
        squares = sum((-(-length // (2 * w))) ** 2 for length in documents)
        counted = zip(("forward", "backward"), (2, 5), zip(*results, strict=True), strict=True)
        for name, times, work in counted:
            mean, most = sum(work) / w, (2 * w + 2) * squares * times * PAIR
            slowest = max(range(w), key=work.__getitem__)
            if work[slowest] > 1.1 * mean:
                text = f"{name}, {w} ranks: rank {slowest} computes {work[slowest] / mean:.2f} "
                text += f"times the mean (FLOPs by rank: {[*work]}): all wait for it"
                fail(text, cause="unequal-work", rank=slowest)
            if work[slowest] > most:
                text = f"{name}, {w} ranks: rank {slowest} computes {work[slowest]:,} FLOPs, "
                text += f"{times} products of (2W+2)·c² pairs are {most:,}: does it multiply what "
                fail(text + "the mask hides?", cause="masked-work", rank=slowest)
            if work[slowest] < most / 2:
                fail(f"{name}: only {work[slowest]:,} FLOPs", cause="too-little-work", rank=slowest)


@exercise("2.22", "virtual gloo", asserts="bytes around needed wire cost")
def test_blocks_go_round_the_ring(impl, run, seed):
    """W-1 messages forward, 2(W-1) backward, all to the right neighbour, with exact bytes."""
    kinds = {torch.float64: 8, torch.bfloat16: 4}  # bytes of a gradient on the wire

    def body(ctx):
        rows = zigzag([24], ctx.rank, ctx.world_size)
        whole = drawn(seed, 24)
        for dtype in kinds:
            q, k, v, grad = (at(t, rows).to(dtype) for t in whole)
            for frozen in (False, True):
                k, v = (t.detach().requires_grad_(not frozen) for t in (k, v))
                with ctx.region(f"forward {dtype} {frozen}"):
                    out = impl.ring_attention(q.detach().requires_grad_(), k, v)
                with ctx.region(f"backward {dtype} {frozen}"):
                    out.backward(grad)

    for w in (3, 2, 1):
        for log in run(body, w).logs:
            log.all_waited()
            numbers = 2 * BATCH * GROUPS * 24 // w * WIDTH
            for dtype, size in kinds.items():
                for frozen in (False, True):
                    block = (w - 1) * numbers * dtype.itemsize
                    back = 0 if frozen else (w - 1) * numbers * size
                    name = f"{dtype} {frozen}"
                    check_wire(log, f"forward {name}", block, w - 1, w)
                    count = (1 if frozen else 2) * (w - 1)
                    check_wire(log, f"backward {name}", block + back, count, w)


def check_wire(log, region: str, nbytes: int, messages: int, w: int) -> None:
    """Exactly these bytes, in these messages, to the right neighbour."""
    part, words = log.select(region=region), region.replace("True", "with k and v frozen")
    words = words.replace("False", "all trainable")
    part.sent_at_most(nbytes, f"{words}, {w} ranks")
    part.sent_at_least(nbytes, f"{words}, {w} ranks")
    if part.messages != messages:
        text = f"{words}: {part.messages} messages instead of {messages}"
        fail(text, cause="message-count", rank=log.rank)
    for event in part.events:
        step = 1 if event.op == "send" else -1
        if event.op not in ("send", "recv") or event.peer != (log.rank + step) % w:
            text = f"{words}: {event}; blocks go to the right neighbour, and come from the left one"
            fail(text, cause="neighbour", rank=log.rank, line=event.line)


@exercise("2.22", "virtual", asserts="overlap cost")
def test_the_next_block_travels_meanwhile(impl, run, seed):
    """Five blocks on a slow wire: a message takes 0.8 of a step's work, and hardly adds time."""
    w, length, rate = 5, 80, 1e6
    unit = 4 * (length // (2 * w)) ** 2 * PAIR / rate  # a step: 2 products of 2c² pairs
    block = 2 * BATCH * GROUPS * length // w * WIDTH * 8
    node = load_cluster("dgx-h100")
    gpu = dataclasses.replace(
        node.gpu, flops={"float64": rate, "float32": rate}, bandwidth=1e15, kernel=1e-12
    )

    def body(ctx):
        rows = zigzag([length], ctx.rank, ctx.world_size)
        *given, grad = (at(t, rows) for t in drawn(seed, length))
        q, k, v = (t.requires_grad_() for t in given)
        dist.barrier()
        begin = time.perf_counter()
        out = impl.ring_attention(q, k, v)
        middle = time.perf_counter()
        out.backward(grad)
        return middle - begin, time.perf_counter() - middle

    took = []
    for seconds in (1e-9, 0.8 * unit):
        link = dataclasses.replace(node.inside, alpha=0.0, bandwidth=block / seconds)
        cluster = dataclasses.replace(node, inside=link, gpu=gpu)
        took.append(run.simulate(body, w, cluster=cluster, compute="roofline"))
    for rank, (fast, slow) in enumerate(zip(*took, strict=True)):
        allowed = {"forward": 0.5, "backward": 1.5}  # the last gradients come after all work
        for (name, most), a, b in zip(allowed.items(), fast, slow, strict=True):
            extra = (b - a) / (0.8 * unit)
            if extra > most:
                text = f"{name}: {w - 1} blocks on a slow wire make rank {rank} later by the time "
                text += f"of {extra:.1f} messages, {most} at most: start to send a block before "
                fail(text + "you compute with it", cause="no-overlap", rank=rank)


HALVES = "bfloat16, strided"  # a copy in float32, or a contiguous one, is no argument


@exercise("2.22", "virtual", asserts="kept resources")
def test_no_rank_holds_all_blocks(impl, run, seed):
    """Kept for backward: arguments, result, a number per query; the peak does not grow with W."""
    t = 8

    def body(ctx):
        q, k, v, grad = (t_.clone() for t_ in drawn(seed + ctx.rank, t, 2, 2, 4, 64))
        views = [x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        with PeakMemory() as memory:
            out = impl.ring_attention(*(x.requires_grad_() for x in views))
            short = memory.current - out.untyped_storage().nbytes()
            del out
        with PeakMemory() as memory:
            out = impl.ring_attention(*(x.requires_grad_() for x in (q, k, v)))
            kept = memory.current - out.untyped_storage().nbytes()
            forward = memory.peak
            out.backward(grad)
            del out
            left = memory.current - storage_bytes([x.grad for x in (q, k, v)])
            return (kept, short), forward, memory.peak, left

    few, many = (run(body, w) for w in (4, 7))
    unit = values(seed, 0, 4, 2, t, 64).nbytes
    for rank, (kept, _, _, left) in enumerate(many):
        for what, nbytes, size in zip(("float64", HALVES), kept, (unit, unit / 4), strict=True):
            if nbytes > size / 8:
                text = f"{what}: rank {rank} keeps {nbytes / size:.2f} times the size of q for "
                text += "backward, beside arguments and result"
                fail(text, cause="too-much-memory", rank=rank)
        if left > unit / 8:
            text = f"after backward rank {rank} has {left / unit:.2f} times the size of q in memory"
            fail(text, cause="too-much-memory", rank=rank)
    for place, name in ((1, "forward"), (2, "backward")):
        small, large = (max(each[place] for each in results) for results in (few, many))
        if large > small + unit:
            text = f"{name}: the peak is {large / unit:.1f} times the size of q on 7 ranks, and "
            text += f"{small / unit:.1f} on 4: a block that was used must go"
            fail(text, cause="too-much-memory")


@exercise("2.22", "virtual", asserts="refusals outsider life")
def test_ring_refuses_what_does_not_fit(impl, run, seed):
    """Shapes, dtypes and lengths that don't fit, a foreign process: ValueError, nothing sent."""
    x = torch.ones(1, 4, 6, 8)
    calls = {
        "an odd number of positions": (x[:, :, :5],) * 3,
        "lengths for 8 positions, and 6": (x, x, x, [19]),
        "lengths for 8 positions in two documents": (x, x, x, [9, 9]),
        "a document without positions": (x, x, x, [18, 0]),
        "a document of -1 positions": (x, x, x, [24, -1]),
        "3 heads of k for 4 of q": (x, x[:, :3], x[:, :3]),
        "8 heads of k for 4 of q": (x, *[x.repeat(1, 2, 1, 1)] * 2),
        "no heads of k": (x, x[:, :0], x[:, :0]),
        "values of other shape than keys": (x, x[:, :2], x),
        "keys of fewer positions": (x, x[:, :, :4], x[:, :, :4]),
        "keys of fewer features": (x, x[..., :4], x[..., :4]),
        "keys of another batch": (x, *[x.repeat(2, 1, 1, 1)] * 2),
        "three dimensions": (x[0],) * 3,
        "keys of another dtype": (x, x.half(), x),
        "values of another dtype": (x, x, x.double()),
        "integers": (x.long(),) * 3,
    }

    def body(ctx):
        group = dist.new_group([0, 1])
        found = [refusal(impl.ring_attention, *call) for call in calls.values()]
        found += [refusal(impl.chunk_sizes, [3, 0], 2), refusal(impl.own_positions, [0], 0, 2)]
        if ctx.rank == 2:
            found.append(refusal(impl.ring_attention, x, x, x, group=group))
        return found

    words = [*calls, "chunks of an empty document", "positions of an empty document"]
    results = run(body, 3)
    expect_refusals(results[2][len(words) :], ["a process outside of the group"], rank=2)
    results[2] = results[2][: len(words)]
    expect_refused(results, words)

    def again(ctx):
        refusal(impl.ring_attention, *calls["an odd number of positions"])
        rows = zigzag([12], ctx.rank, ctx.world_size)
        return impl.ring_attention(*[at(t, rows) for t in drawn(seed, 12)[:3]])

    want = one_process(*drawn(seed, 12), [12])[0]
    for rank, got in enumerate(run(again, 3)):
        right = want[:, :, zigzag([12], rank, 3)]
        expect_close(got, right, what="the result after a refusal", rank=rank, rtol=1e-9)
