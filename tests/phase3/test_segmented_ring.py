"""Checks of exercise 3.4: the segmented ring, which hides latency and additions."""

from __future__ import annotations

import dataclasses
import math

import torch

from distlab.grading import exercise, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    NODE,
    N,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_neighbours,
    check_refusals,
    check_strided,
    check_subgroup,
    check_time,
    chunk_sizes,
    distinct,
    warm_and_drawn,
    whole,
)

LONG = round(4 * ALPHA / BETA / 4)  # elements of 4 bytes that take four times the latency


@exercise("3.4", "virtual gloo cuda")
def test_segments_give_the_same_result(impl, run, seed, cases):
    """All operators, any length and W, with segments of 1 to all elements of a chunk."""
    for segment_bytes in (8, 1 << 20):
        call = lambda t, op: impl.segmented_ring_all_reduce(t, op, segment_bytes=segment_bytes)
        check_all_reduce(run, seed, cases(3, 1, 2, 4, 5), call)


@exercise("3.4", "virtual gloo cuda")
def test_segments_are_small_and_nothing_is_sent_twice(impl, run, cases):
    """No message is longer than segment_bytes; the bytes are the ring's, exactly."""

    def body(ctx, limit):
        impl.segmented_ring_all_reduce(distinct(ctx), segment_bytes=limit)

    for limit in (1 << 20, 256):
        worlds = cases(4, 2, 3, 5)
        for w, results in zip(worlds, run.worlds(body, worlds, limit, delays=True), strict=True):
            sizes = chunk_sizes(N, w)
            hops = 2 * (w - 1) * math.ceil(4 * sizes[0] / limit)
            for log in results.logs:
                elements = 2 * N - sizes[log.rank] - sizes[(log.rank + 1) % w]
                check_neighbours(log)
                check_bytes(log, elements, hops, "2N without two chunks, 2(W-1)/W·N")
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


@exercise("3.4", "virtual")
def test_latency_is_paid_once(impl, run):
    """While a segment travels the next is on its way: 2(W-1)/W·N·β + α of virtual time."""
    def body(ctx):
        tensor = torch.ones(3 * LONG * ctx.world_size)
        impl.segmented_ring_all_reduce(tensor, segment_bytes=4 * LONG)

    for w in (2, 3, 5):
        seconds = 2 * (w - 1) * 3 * 4 * LONG * BETA + ALPHA
        check_time(run, body, w, seconds, "2(W-1)/W·N·β + α")


@exercise("3.4", "virtual")
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


@exercise("3.4", "virtual")
def test_a_few_segments_of_memory(impl, run):
    """A few buffers of a segment's size, however long the tensor is."""

    def body(ctx):
        tensor = torch.ones(64_000)
        with PeakMemory() as memory:
            impl.segmented_ring_all_reduce(tensor, segment_bytes=4_000)
        return memory.peak

    for rank, peak in enumerate(run(body, 4)):
        if peak > 5 * 4_000:
            fail(
                f"rank {rank} allocated {peak:,} bytes for segments of 4,000: one buffer for each "
                "of the few that are on their way is enough",
                cause="too-much-memory",
                rank=rank,
            )


@exercise("3.4", "virtual")
def test_segments_of_views_and_in_groups(impl, run, seed):
    """Strided views and sub-groups, an element at a time; bad arguments are refused at once."""
    segmented = lambda t, **more: impl.segmented_ring_all_reduce(t, segment_bytes=1, **more)
    check_strided(run, seed, segmented, whole)
    check_subgroup(run, seed, lambda t, g: segmented(t, group=g), whole)
    wrong = bad_arguments(lambda t, op: segmented(t, op=op))
    none = lambda: impl.segmented_ring_all_reduce(torch.ones(3), segment_bytes=0)
    check_refusals(run, {**wrong, "segments of 0 bytes": none})


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
