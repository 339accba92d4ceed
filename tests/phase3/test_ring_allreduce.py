"""Checks of exercises 3.1 to 3.3: reduce-scatter, all-gather and all-reduce around a ring."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from tests.phase3.bad_input import check_non_members
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    OPS,
    N,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_layouts,
    check_memory,
    check_neighbours,
    check_not_finite,
    check_refusals,
    check_subgroup,
    check_time,
    chunk_sizes,
    cut,
    named,
    on_the_wire,
    reduced,
    rest_kept,
    values_of,
    warm_and_drawn,
    whole,
)

LARGE = 10_080  # divides by all of 2 … 8


def own_chunk(rows: torch.Tensor, rank: int, op: str) -> tuple[slice, torch.Tensor]:
    """Where rank's chunk is, and its reduction."""
    sizes = chunk_sizes(rows.shape[1], len(rows))
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return part, OPS[op](rows)[part]


def gathered(rows: torch.Tensor, rank: int, op: str = "") -> tuple[slice, torch.Tensor]:
    """Chunk r of row r, for all r."""
    return slice(None), torch.cat([cut(row, len(rows))[r] for r, row in enumerate(rows)])


def ring_time(steps: int, world_size: int) -> float:
    return steps * (ALPHA + 4 * LARGE / world_size * BETA)


# -- 3.1 ------------------------------------------------------------------------------------------
@exercise("3.1", "virtual gloo cuda", nccl=True, asserts="reduction chunks any-tensor dtype alone")
def test_reduce_scatter_completes_the_own_chunk(impl, run, seed, cases):
    """Rank r's chunk r holds the sum, mean or maximum of all ranks, for any length and W."""
    call = lambda tensor, op: impl.ring_reduce_scatter(tensor, op)
    for w, inputs in reduced(run, seed, cases(3, 1, 2, 4, 5), call):
        for case, tensors in inputs:
            rows = values_of(seed, w, *case[1:])
            want = cut(OPS[case[0]](rows), w)
            for rank, got in enumerate(tensors):
                check_chunk(cut(got, w), want, rows, rank, named(case, w))


def check_chunk(got, want, rows: torch.Tensor, rank: int, text: str) -> None:
    """Rank's chunk is the complete one; if another is, the steps are shifted."""
    w = len(rows)
    shifted = (rank + 1) % w
    if not torch.allclose(got[rank], want[rank]) and torch.allclose(got[shifted], want[shifted]):
        fail(
            f"{text}: rank {rank} has completed chunk {shifted}, but chunk {rank} is its own: the "
            "all-gather begins there",
            cause="other-chunk",
            rank=rank,
        )
    expect_close(
        got[rank],
        want[rank],
        what=f"{text}: chunk {rank}",
        rank=rank,
        before=cut(rows[rank], w)[rank] if w > 1 else None,
        contributions=[cut(row, w)[rank] for row in rows] if "max" not in text else [],
        rules=[rest_kept],
    )


@exercise("3.1", "virtual gloo cuda", asserts="neighbours bytes wire-dtype cost")
def test_reduce_scatter_sends_every_chunk_but_its_own(impl, run, cases):
    """W-1 messages to the right neighbour, exactly the bytes of the other chunks."""
    call = lambda ctx, tensor: impl.ring_reduce_scatter(tensor)
    for w, size, log in on_the_wire(run, cases(4, 2, 3, 5), call):
        elements = N - chunk_sizes(N, w)[log.rank]
        check_neighbours(log)
        check_bytes(log, elements, w - 1, "every chunk but its own, (W-1)/W·N", size)


@exercise("3.1", "virtual", asserts="time cost")
def test_reduce_scatter_takes_w_minus_1_steps(impl, run):
    """All links are busy at once: (W-1)·(α + N/W·β) of virtual time."""

    def body(ctx):
        impl.ring_reduce_scatter(torch.ones(LARGE))

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(w - 1, w), "(W-1)·(α + N/W·β)")


@exercise("3.1", "virtual", asserts="any-tensor in-place leaf nan layout")
def test_reduce_scatter_on_views(impl, run, seed):
    """Any strides: reduced in place, and nothing beside the tensor changes."""
    call = lambda tensor, op, group: impl.ring_reduce_scatter(tensor, op, group)
    check_layouts(run, seed, call, own_chunk)
    check_not_finite(run, lambda tensor, op: impl.ring_reduce_scatter(tensor, op), own_chunk)


@exercise("3.1", "virtual", asserts="group neighbours refused refusals life")
def test_reduce_scatter_in_groups(impl, run, seed):
    """Ranks are the group's, and so are neighbours; bad arguments are refused."""
    call = lambda tensor, op, group: impl.ring_reduce_scatter(tensor, op, group)
    for log in check_subgroup(run, seed, call, own_chunk).logs:
        check_neighbours(log.select(region="group"))
    check_refusals(run, bad_arguments(lambda t, op: impl.ring_reduce_scatter(t, op)))


@exercise("3.1", "virtual", asserts="memory resources")
def test_reduce_scatter_needs_one_chunk_of_memory(impl, run):
    """A buffer of one chunk's size is enough, and is not kept."""
    call = lambda tensor: impl.ring_reduce_scatter(tensor)
    check_memory(run, 8, LARGE, call, 4 * LARGE // 8, "one chunk")


@exercise("3.1", "virtual", asserts="steps-of-reduce-scatter")
def test_steps_of_the_reduce_scatter(impl, run):
    """The chunks of every step, for one to six ranks."""

    def body(ctx):
        return [impl.reduce_scatter_steps(rank, w) for w in range(1, 7) for rank in range(w)]

    check_steps(run(body, 1, process_group=False)[0], first=-1, last=lambda rank, w: rank)


def check_steps(found, first: int, last) -> None:
    """``rank + first`` is sent first; each chunk received is sent next, ``last(rank, w)`` never."""
    cases = [(rank, w) for w in range(1, 7) for rank in range(w)]
    for (rank, w), got in zip(cases, found, strict=True):
        chunks = [(rank + first - step) % w for step in range(w)]
        want = [*itertools.pairwise(chunks)]
        assert not want or want[-1][1] == last(rank, w)
        what = f"(send, receive) in the steps of rank {rank} of {w}"
        expect_equal(got, want, what=what, cause="wrong-steps")


@exercise("3.1", "virtual", asserts="flat-view flat-copy")
def test_flat_is_a_view_or_written_back(impl, run):
    """A contiguous tensor's elements are changed at once, any other's at the end."""
    storage = torch.arange(24.0)

    def body(ctx):
        found = []
        for layout in ((2, 3), (3, 1), 4), ((3, 2), (1, 3), 4), ((5,), (2,), 1), ((), (), 3):
            base = storage.clone()
            tensor = base.as_strided(*layout).requires_grad_()
            with impl.flattened(tensor) as flat:
                given = flat.clone(), flat.is_contiguous(), flat.requires_grad
                flat.mul_(-1)
                inside = base.clone()
            found.append((*given, inside, base, tensor.is_leaf))
        return found

    names = "contiguous", "transposed", "every second element", "0-d"
    layouts = [((2, 3), (3, 1), 4), ((3, 2), (1, 3), 4), ((5,), (2,), 1), ((), (), 3)]
    found = run(body, 1, process_group=False)[0]
    for name, layout, each in zip(names, layouts, found, strict=True):
        flat, contiguous, tracked, inside, after, leaf = each
        after_want, part = storage.clone(), storage.as_strided(*layout)
        after_want.as_strided(*layout).mul_(-1)
        expect_close(flat, part.flatten(), what=f"flat of a tensor that is {name}")
        facts = contiguous, tracked, leaf
        what = f"{name}: (flat is contiguous, requires gradients, the tensor is a leaf)"
        expect_equal(facts, (True, False, True), what=what, cause="leaf")
        expect_close(after, after_want, what=f"{name}: the tensor after the block", before=storage)
        if part.is_contiguous() and not torch.equal(inside, after_want):
            fail(f"{name}: flat is a copy, a view needs no memory", cause="copies")


@exercise("3.1", "virtual", asserts="starts receive-first not-empty group-rank")
def test_exchange_starts_and_does_not_wait(impl, run):
    """Rank 1 begins when rank 0 has begun, and receives when rank 0 has received."""

    def body(ctx):
        group = dist.new_group([1, 2])
        if ctx.rank == 0:
            return None
        rank = ctx.rank - 1  # of the group
        out, into, token = torch.full((3,), 5.0 + rank), torch.zeros(3), torch.zeros(1)
        if rank == 0:
            handles = impl.exchange(out, 1, into, 1, group)
            dist.send(token, 2, tag=1)
            impl.wait(handles[:1])
            received = into.clone()
            dist.send(token, 2, tag=1)
            impl.wait(handles[1:])
        else:
            dist.recv(token, 1, tag=1)
            sent = dist.isend(out, group=group, group_dst=0)
            dist.recv(token, 1, tag=1)
            received = torch.zeros(3)
            dist.recv(received, group=group, group_src=0)
            sent.wait()
        with ctx.region("empty"):
            nothing = len(impl.exchange(out[:0], 1 - rank, into[:0], 1 - rank, group))
        one = (out, into[:0]) if rank == 0 else (out[:0], into)
        with ctx.region("one way"):
            handles = impl.exchange(one[0], 1 - rank, one[1], 1 - rank, group)
            impl.wait(handles)
        return received, nothing, len(handles), into

    results = run(body, 3)
    for rank, other in ((1, 6.0), (2, 5.0)):
        received, nothing, one_way, into = results[rank]
        expect_close(received, torch.full((3,), other), what="what was received", rank=rank)
        counts = nothing, one_way
        what = "handles of an exchange of nothing, and of one in one direction"
        expect_equal(counts, (0, 1), what=what, rank=rank, cause="empty-sent")
        events = results.logs[rank].select(region="empty").events
        expect_equal(events, [], what="messages without elements", rank=rank, cause="empty-sent")
    expect_close(results[2][3], torch.full((3,), 5.0), what="what came in one direction", rank=2)


# -- 3.2 ------------------------------------------------------------------------------------------
@exercise("3.2", "virtual gloo cuda", asserts="gathered any-tensor dtype alone")
def test_all_gather_brings_every_chunk_everywhere(impl, run, seed, cases):
    """Chunk r of every rank's tensor equals rank r's own chunk r, for any length and W."""
    call = lambda tensor, op: impl.ring_all_gather(tensor)
    for w, inputs in reduced(run, seed, cases(3, 1, 2, 4, 5), call):
        for case, tensors in inputs:
            rows = values_of(seed, w, *case[1:])
            for rank, got in enumerate(tensors):
                expect_close(
                    got,
                    gathered(rows, rank)[1],
                    what=f"all-gather of {case[1]} elements over {w} ranks",
                    rank=rank,
                    before=rows[rank] if w > 1 else None,
                    chunks=w,
                )


@exercise("3.2", "virtual gloo cuda", asserts="neighbours bytes cost")
def test_all_gather_sends_every_chunk_but_one(impl, run, cases):
    """W-1 messages to the right neighbour, exactly the bytes of all chunks but that neighbour's."""
    call = lambda ctx, tensor: impl.ring_all_gather(tensor)
    text = "every chunk but its right neighbour's, (W-1)/W·N"
    for w, size, log in on_the_wire(run, cases(4, 2, 3, 5), call):
        elements = N - chunk_sizes(N, w)[(log.rank + 1) % w]
        check_neighbours(log)
        check_bytes(log, elements, w - 1, text, size)


@exercise("3.2", "virtual", asserts="time memory cost resources")
def test_all_gather_takes_w_minus_1_steps_and_no_memory(impl, run):
    """(W-1)·(α + N/W·β) of virtual time; chunks are received where they belong."""

    def body(ctx):
        impl.ring_all_gather(torch.ones(LARGE))

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(w - 1, w), "(W-1)·(α + N/W·β)")
    check_memory(run, 4, LARGE, lambda tensor: impl.ring_all_gather(tensor), 0, "nothing")


@exercise("3.2", "virtual", asserts="group layout any-tensor in-place leaf refused refusals life")
def test_all_gather_on_views_and_in_groups(impl, run, seed):
    """Any strides are filled in place; ranks and neighbours are those of the group."""
    call = lambda tensor, op, group: impl.ring_all_gather(tensor, group)
    check_layouts(run, seed, call, gathered)
    for log in check_subgroup(run, seed, call, gathered).logs:
        check_neighbours(log.select(region="group"))


@exercise("3.2", "virtual", asserts="steps-of-all-gather")
def test_steps_of_the_all_gather(impl, run):
    """The chunks of every step, for one to six ranks."""

    def body(ctx):
        return [impl.all_gather_steps(rank, w) for w in range(1, 7) for rank in range(w)]

    found = run(body, 1, process_group=False)[0]
    check_steps(found, first=0, last=lambda rank, w: (rank + 1) % w)


# -- 3.3 ------------------------------------------------------------------------------------------
@exercise("3.3", "virtual gloo cuda", asserts="reduction same-bits any-tensor dtype alone")
def test_all_reduce_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, in place, the same bits on every rank."""
    call = lambda tensor, op: impl.ring_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 1, 2, 4, 5), call)


@exercise("3.3", "virtual gloo cuda", asserts="bytes neighbours cost")
def test_all_reduce_sends_the_least_possible(impl, run, cases):
    """2(W-1) messages, 2(W-1)/W of the bytes: each chunk twice except for two of them."""
    call = lambda ctx, tensor: impl.ring_all_reduce(tensor)
    for w, size, log in on_the_wire(run, cases(4, 2, 3, 5), call):
        sizes = chunk_sizes(N, w)
        elements = 2 * N - sizes[log.rank] - sizes[(log.rank + 1) % w]
        check_neighbours(log)
        check_bytes(log, elements, 2 * (w - 1), "2N without two chunks, 2(W-1)/W·N", size)


@exercise("3.3", "virtual", asserts="time memory cost resources")
def test_all_reduce_takes_the_rings_time(impl, run):
    """2(W-1)·(α + N/W·β) of virtual time, one chunk of memory."""

    def body(ctx):
        impl.ring_all_reduce(torch.ones(LARGE))

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(2 * (w - 1), w), "2(W-1)·(α + N/W·β)")
    call = lambda tensor: impl.ring_all_reduce(tensor)
    check_memory(run, 8, LARGE, call, 4 * LARGE // 8, "one chunk")


@exercise("3.3", "virtual", asserts="any-tensor in-place leaf nan layout")
def test_all_reduce_on_views(impl, run, seed):
    """Any strides: reduced in place, and nothing beside the tensor changes."""
    call = lambda tensor, op, group: impl.ring_all_reduce(tensor, op, group)
    check_layouts(run, seed, call, whole)
    check_not_finite(run, lambda tensor, op: impl.ring_all_reduce(tensor, op), whole)


@exercise("3.3", "virtual", asserts="group refused refusals life")
def test_all_reduce_in_groups(impl, run, seed):
    """Ranks are those of the group, also for the agreement; bad arguments are refused."""
    call = lambda tensor, op, group: impl.ring_all_reduce(tensor, op, group, check=op != "sum")
    check_subgroup(run, seed, call, whole)
    check_refusals(run, bad_arguments(lambda t, op: impl.ring_all_reduce(t, op)))


# what the rank that differs passes, what the next one does, what all others do
ONES = torch.ones(5)
LONG = torch.ones(1, dtype=torch.int8)
DIFFERENT = {
    "a longer tensor": [(torch.ones(6), "sum"), (ONES, "sum"), (ONES, "sum")],
    "an empty tensor": [(ONES[:0], "sum"), (ONES, "sum"), (ONES, "sum")],
    "a tensor longer by one than the next rank's": [
        (torch.ones(6), "sum"),
        (torch.ones(4), "sum"),
        (ONES, "sum"),
    ],
    "one element more than 2^24": [
        (LONG.expand(2**24 + 1), "max"),
        (LONG.expand(2**24), "max"),
        (LONG.expand(2**24), "max"),
    ],
    "integers": [(ONES.long(), "sum"), (ONES, "sum"), (ONES, "sum")],
    "integers of the same size": [(ONES.int(), "max"), (ONES, "max"), (ONES, "max")],
    "bfloat16 instead of float16": [
        (ONES.bfloat16(), "mean"),
        (ONES.half(), "mean"),
        (ONES.half(), "mean"),
    ],
    "another operator": [(ONES, "sum"), (ONES, "max"), (ONES, "max")],
    "the mean instead of the sum": [(ONES, "mean"), (ONES, "sum"), (ONES, "sum")],
    "an unknown operator": [(ONES, "median"), (ONES, "max"), (ONES, "max")],
    "an unknown operator instead of the sum": [(ONES, "plus"), (ONES, "sum"), (ONES, "sum")],
    "an unknown operator instead of the mean": [(ONES, "plus"), (ONES, "mean"), (ONES, "mean")],
}


@exercise("3.3", "virtual gloo cuda", nccl=True, asserts="agree check alone refusals life")
def test_check_tells_every_rank(impl, run, cases):
    """With check=True every rank raises ValueError at a difference; equal tensors are reduced."""

    def attempt(ctx, one: int, case: str) -> tuple[str, str]:
        behind = (ctx.rank - one) % ctx.world_size
        tensor, op = DIFFERENT[case][min(behind, 2)]
        mine = tensor.to(ctx.device, copy=True)
        alone = refusal(impl.agree, mine, op)
        dist.barrier()  # a rank that raises alone is not to meet the others in the next case
        together = refusal(impl.ring_all_reduce, mine, op, check=True)
        dist.barrier()
        return alone, together

    def body(ctx):
        said = [attempt(ctx, one, case) for one in range(ctx.world_size) for case in DIFFERENT]
        tensor = torch.ones((2, 3) if ctx.rank else 6, device=ctx.device)
        impl.ring_all_reduce(tensor, check=True)
        return said, tensor.flatten().cpu()

    worlds = cases(3, 2, 4, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        names = [f"{w} ranks, rank {one} passes {case}" for one in range(w) for case in DIFFERENT]
        for rank, (said, tensor) in enumerate(results):
            for name, texts in zip(names, said, strict=True):
                expect_refusals(texts, [f"agree, {name}", f"check=True, {name}"], rank=rank)
            text = f"{w} ranks with equally many elements and check=True"
            expect_close(tensor, torch.full((6,), float(w)), what=text, rank=rank)


@exercise("3.3", "virtual", asserts="agree-member refusals group")
def test_who_is_no_member_does_not_agree(impl, run):
    """A rank outside the group gets a ValueError from agree and sends nothing."""
    check_non_members(run, {"agree": lambda group: impl.agree(ONES.clone(), "sum", group)})


@exercise("3.3", "virtual", asserts="agree-cost check-cost time cost")
def test_check_costs_a_few_tiny_messages(impl, run):
    """At most ⌈log₂ W⌉ messages of 48 bytes more, and time for as many latencies."""

    def body(ctx):
        impl.ring_all_reduce(torch.ones(LARGE), check=True)

    for w in (2, 5, 8):
        rounds = (w - 1).bit_length()
        for log in run(body, w).logs:
            sizes = chunk_sizes(LARGE, w)
            data = 4 * (2 * LARGE - sizes[log.rank] - sizes[(log.rank + 1) % w])
            log.sent_at_most(data + 48 * rounds, "the ring's bytes and 48·⌈log₂ W⌉")
            log.sent_at_least(data + 1, "the ring's bytes, and something to agree")
        seconds = ring_time(2 * (w - 1), w) + rounds * (ALPHA + 48 * BETA)
        check_time(run, body, w, seconds, "2(W-1)·(α + N/W·β) + ⌈log₂ W⌉·(α + 48β)")


@trace("3.1")
@trace("3.2")
@trace("3.3")
def trace_ring(impl):
    """Reduce-scatter, then all-gather, of 8 MB on every rank."""

    def body(ctx):
        tensor = torch.ones(2_000_000)
        for _ in warm_and_drawn(ctx):
            with ctx.region("reduce-scatter"):
                impl.ring_reduce_scatter(tensor)
            with ctx.region("all-gather"):
                impl.ring_all_gather(tensor)

    return body
