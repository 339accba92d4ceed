"""Checks of exercise 3.4: the segmented ring, which hides latency and additions."""

from __future__ import annotations

import dataclasses
import math

import torch

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    NODE,
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
    on_the_wire,
    warm_and_drawn,
    whole,
)

LONG = round(4 * ALPHA / BETA / 4)  # elements of 4 bytes that take four times the latency


@exercise("3.4", "virtual gloo cuda", asserts="reduction any-tensor dtype alone")
def test_segments_give_the_same_result(impl, run, seed, cases):
    """All operators, any length and W, with segments of 1 to all elements of a chunk."""
    for segment_bytes in (8, 1 << 20):
        call = lambda t, op: impl.segmented_ring_all_reduce(t, op, segment_bytes=segment_bytes)
        check_all_reduce(run, seed, cases(3, 1, 2, 4, 5), call)


@exercise("3.4", "virtual gloo cuda", asserts="messages bytes neighbours cost dtype")
def test_segments_are_small_and_nothing_is_sent_twice(impl, run, cases):
    """No message is longer than segment_bytes; the bytes are the ring's, exactly."""
    for limit in (1 << 20, 257):
        call = lambda ctx, tensor: impl.segmented_ring_all_reduce(tensor, segment_bytes=limit)
        for w, size, log in on_the_wire(run, cases(4, 2, 3, 5), call):
            sizes = chunk_sizes(N, w)
            hops = 2 * (w - 1) * math.ceil(sizes[0] / (limit // size))
            elements = 2 * N - sizes[log.rank] - sizes[(log.rank + 1) % w]
            check_neighbours(log)
            check_bytes(log, elements, hops, "2N without two chunks, 2(W-1)/W·N", size)
            check_longest(log, limit)


def check_longest(log, limit: int) -> None:
    longest = max(log.events, key=lambda event: event.payload)
    if longest.payload > limit:
        fail(
            f"rank {log.rank}: {longest}, {longest.payload} bytes, although segment_bytes is "
            f"{limit}",
            cause="long-segment",
            rank=log.rank,
            line=longest.line,
        )


@exercise("3.4", "virtual", asserts="time cost")
def test_latency_is_paid_once(impl, run):
    """While a segment travels the next is on its way: 2(W-1)/W·N·β + α of virtual time."""

    def body(ctx):
        tensor = torch.ones(3 * LONG * ctx.world_size)
        impl.segmented_ring_all_reduce(tensor, segment_bytes=4 * LONG)

    for w in (2, 3, 5):
        seconds = 2 * (w - 1) * 3 * 4 * LONG * BETA + ALPHA
        check_time(run, body, w, seconds, "2(W-1)/W·N·β + α")


@exercise("3.4", "virtual", asserts="hidden cost")
def test_additions_are_hidden(impl, run):
    """Adding takes half as long as sending, and yet hardly any time of its own."""
    count, w = 6, 3
    gpu = dataclasses.replace(NODE.gpu, kernel=1e-12, bandwidth=3 / (0.5 * BETA))
    cluster = dataclasses.replace(NODE, gpu=gpu)  # an addition reads two operands, writes one

    def body(ctx):
        tensor = torch.empty(count * LONG * ctx.world_size)  # filling it would take time
        impl.segmented_ring_all_reduce(tensor, segment_bytes=4 * LONG)

    alone = run.simulate(body, w, cluster=cluster).clock
    both = run.simulate(body, w, cluster=cluster, compute="roofline").clock
    adding = (w - 1) * count * 4 * LONG * 0.5 * BETA
    if both - alone > 0.4 * adding:
        fail(
            f"additions of {adding * 1e6:.1f} µs make the all-reduce {(both - alone) * 1e6:.1f} µs "
            "longer: start the next segment before you combine this one",
            cause="additions-exposed",
        )


@exercise("3.4", "virtual", asserts="memory resources")
def test_a_few_segments_of_memory(impl, run):
    """A few buffers of a segment's size, however long the tensor is."""
    call = lambda tensor: impl.segmented_ring_all_reduce(tensor, segment_bytes=4_000)
    check_memory(run, 4, 64_000, call, 5 * 4_000, "one buffer for each segment on its way")


@exercise("3.4", "virtual", asserts="any-tensor layout leaf nan")
def test_segments_of_views(impl, run, seed):
    """Any strides, an element at a time: reduced in place, and nothing beside the tensor."""
    segmented = lambda t, *more: impl.segmented_ring_all_reduce(t, *more, segment_bytes=1)
    check_layouts(run, seed, segmented, whole)
    check_not_finite(run, segmented, whole)


@exercise("3.4", "virtual", asserts="group refused refusals life")
def test_segments_in_groups(impl, run, seed):
    """Ranks and neighbours are the group's; bad arguments are refused before anything is sent."""
    segmented = lambda t, *more: impl.segmented_ring_all_reduce(t, *more, segment_bytes=4)
    for log in check_subgroup(run, seed, segmented, whole).logs:
        check_neighbours(log.select(region="group"))
        check_longest(log.select(region="group"), 4)
    wrong = bad_arguments(segmented)
    for limit in (0, -8):
        none = lambda limit=limit: impl.segmented_ring_all_reduce(
            torch.ones(3), segment_bytes=limit
        )
        wrong[f"segments of {limit} bytes"] = none
    check_refusals(run, wrong)


@exercise("3.4", "virtual", asserts="hops")
def test_hops_in_their_order(impl, run):
    """2(W-1)·S hops; each sends the segment that the hop S before it brought; which
    hops combine and complete."""
    cases = [(w, s) for w in (1, 2, 4) for s in (1, 3)]

    def body(ctx):
        found = []
        for w, s in cases:
            for rank in range(w):
                segments = [[torch.tensor([10.0 * c + k]) for k in range(s)] for c in range(w)]
                found.append(
                    [
                        (hop.outgoing.item(), hop.target.item(), hop.combines, hop.completes)
                        for hop in impl.ring_hops(rank, segments)
                    ]
                )
        return found

    found = iter(run(body, 1, process_group=False)[0])
    for w, s in cases:
        for rank in range(w):
            want = []
            for step in range(2 * (w - 1)):
                send, receive = (rank - step - 1) % w, (rank - step - 2) % w
                first, last = step < w - 1, step == w - 2
                want += [(10.0 * send + k, 10.0 * receive + k, first, last) for k in range(s)]
            what = f"(chunk and segment sent, received, combines, completes), rank {rank} of {w}"
            expect_equal(next(found), want, what=what, cause="wrong-hops")


@trace("3.4")
def trace_segments(impl):
    """32 MB on every rank, plain and in two segments per chunk."""

    def body(ctx):
        tensor = torch.ones(8_000_000)
        for _ in warm_and_drawn(ctx):
            with ctx.region("plain"):
                impl.module("ring_allreduce").ring_all_reduce(tensor)
            with ctx.region("segmented"):
                impl.segmented_ring_all_reduce(tensor, segment_bytes=1 << 22)

    return body
