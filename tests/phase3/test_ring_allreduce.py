"""Checks of exercises 3.1 to 3.3: reduce-scatter, all-gather and all-reduce around a ring."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    OPS,
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
    cut,
    distinct,
    named,
    reduced,
    rest_kept,
    values_of,
    warm_and_drawn,
    whole,
)

LARGE = 10_080  # divides by all of 2 … 8


def own_chunk(rows: torch.Tensor, rank: int) -> tuple[slice, torch.Tensor]:
    """Where rank's chunk is, and its sum."""
    sizes = chunk_sizes(rows.shape[1], len(rows))
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return part, rows.sum(0)[part]


def gathered(rows: torch.Tensor, rank: int) -> tuple[slice, torch.Tensor]:
    """Chunk r of row r, for all r."""
    return slice(None), torch.cat([cut(row, len(rows))[r] for r, row in enumerate(rows)])


def ring_time(steps: int, world_size: int) -> float:
    return steps * (ALPHA + 4 * LARGE / world_size * BETA)


# -- 3.1 ------------------------------------------------------------------------------------------
@exercise("3.1", "virtual gloo cuda")
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


@exercise("3.1", "virtual gloo cuda")
def test_reduce_scatter_sends_every_chunk_but_its_own(impl, run, cases):
    """W-1 messages to the right neighbour, exactly the bytes of the other chunks."""

    def body(ctx):
        impl.ring_reduce_scatter(distinct(ctx))

    worlds = cases(4, 2, 3, 5)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        for log in results.logs:
            elements = N - chunk_sizes(N, w)[log.rank]
            check_neighbours(log)
            check_bytes(log, elements, w - 1, "every chunk but its own, (W-1)/W·N")


@exercise("3.1", "virtual")
def test_reduce_scatter_takes_w_minus_1_steps(impl, run):
    """All links are busy at once: (W-1)·(α + N/W·β) of virtual time."""

    def body(ctx):
        impl.ring_reduce_scatter(torch.ones(LARGE))

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(w - 1, w), "(W-1)·(α + N/W·β)")


@exercise("3.1", "virtual")
def test_reduce_scatter_on_views_and_in_groups(impl, run, seed):
    """A strided view is reduced in place, ranks are the group's, bad arguments are refused."""
    check_strided(run, seed, lambda t: impl.ring_reduce_scatter(t), own_chunk)
    check_subgroup(run, seed, lambda t, g: impl.ring_reduce_scatter(t, group=g), own_chunk)
    check_refusals(run, bad_arguments(lambda t, op: impl.ring_reduce_scatter(t, op)))


@exercise("3.1", "virtual")
def test_reduce_scatter_needs_one_chunk_of_memory(impl, run):
    """A buffer of one chunk's size is enough."""

    def body(ctx):
        tensor = torch.ones(LARGE)
        with PeakMemory() as memory:
            impl.ring_reduce_scatter(tensor)
        return memory.peak

    check_memory(run(body, 8), LARGE // 8, "one chunk")


def check_memory(peaks: list[int], elements: int, what: str) -> None:
    """At most so many float32 elements beside the tensor, and a little."""
    for rank, peak in enumerate(peaks):
        if peak > 4 * elements + 1000:
            fail(
                f"rank {rank} allocated {peak:,} bytes beside the tensor of {4 * LARGE:,}: "
                f"{what}, {4 * elements:,} bytes, is enough",
                cause="too-much-memory",
                rank=rank,
            )


# -- 3.2 ------------------------------------------------------------------------------------------
@exercise("3.2", "virtual gloo cuda")
def test_all_gather_brings_every_chunk_everywhere(impl, run, seed, cases):
    """Chunk r of every rank's tensor is what rank r had in it, for any length and W."""
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


@exercise("3.2", "virtual gloo cuda")
def test_all_gather_sends_every_chunk_but_one(impl, run, cases):
    """W-1 messages to the right neighbour, exactly the bytes of all chunks but that neighbour's."""

    def body(ctx):
        impl.ring_all_gather(distinct(ctx))

    worlds = cases(4, 2, 3, 5)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        for log in results.logs:
            elements = N - chunk_sizes(N, w)[(log.rank + 1) % w]
            check_neighbours(log)
            check_bytes(log, elements, w - 1, "every chunk but its right neighbour's, (W-1)/W·N")


@exercise("3.2", "virtual")
def test_all_gather_takes_w_minus_1_steps_and_no_memory(impl, run):
    """(W-1)·(α + N/W·β) of virtual time; chunks are received where they belong."""

    def body(ctx):
        tensor = torch.ones(LARGE)
        with PeakMemory() as memory:
            impl.ring_all_gather(tensor)
        return memory.peak

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(w - 1, w), "(W-1)·(α + N/W·β)")
    check_memory(run(body, 4), 0, "nothing")


@exercise("3.2", "virtual")
def test_all_gather_on_views_and_in_groups(impl, run, seed):
    """A strided view is filled in place; ranks are those of the group."""
    check_strided(run, seed, lambda t: impl.ring_all_gather(t), gathered)
    check_subgroup(run, seed, lambda t, g: impl.ring_all_gather(t, g), gathered)


# -- 3.3 ------------------------------------------------------------------------------------------
@exercise("3.3", "virtual gloo cuda")
def test_all_reduce_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, in place, the same bits on every rank."""
    call = lambda tensor, op: impl.ring_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 1, 2, 4, 5), call)


@exercise("3.3", "virtual gloo cuda")
def test_all_reduce_sends_the_least_possible(impl, run, cases):
    """2(W-1) messages, 2(W-1)/W of the bytes: each chunk twice but for two of them."""

    def body(ctx):
        impl.ring_all_reduce(distinct(ctx), "mean")

    worlds = cases(4, 2, 3, 5)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        sizes = chunk_sizes(N, w)
        for log in results.logs:
            elements = 2 * N - sizes[log.rank] - sizes[(log.rank + 1) % w]
            check_neighbours(log)
            check_bytes(log, elements, 2 * (w - 1), "2N without two chunks, 2(W-1)/W·N")


@exercise("3.3", "virtual")
def test_all_reduce_takes_the_rings_time(impl, run):
    """2(W-1)·(α + N/W·β) of virtual time, one chunk of memory."""

    def body(ctx):
        tensor = torch.ones(LARGE)
        with PeakMemory() as memory:
            impl.ring_all_reduce(tensor)
        return memory.peak

    for w in (2, 5, 8):
        check_time(run, body, w, ring_time(2 * (w - 1), w), "2(W-1)·(α + N/W·β)")
    check_memory(run(body, 8), LARGE // 8, "one chunk")


@exercise("3.3", "virtual")
def test_all_reduce_on_views_and_in_groups(impl, run, seed):
    """Strided views and sub-groups; bad arguments are refused before anything is sent."""
    check_strided(run, seed, lambda t: impl.ring_all_reduce(t), whole)
    check_subgroup(run, seed, lambda t, g: impl.ring_all_reduce(t, group=g), whole)
    check_refusals(run, bad_arguments(lambda t, op: impl.ring_all_reduce(t, op)))


# what one rank passes, and what the others pass
DIFFERENT = {
    "another length": ((torch.ones(5), "sum"), (torch.ones(6), "sum")),
    "another dtype": ((torch.ones(5), "mean"), (torch.ones(5, dtype=torch.int64), "mean")),
    "another operator": ((torch.ones(5), "sum"), (torch.ones(5), "max")),
    "an unknown operator": ((torch.ones(5), "median"), (torch.ones(5), "max")),
}


@exercise("3.3", "virtual gloo cuda")
def test_check_tells_every_rank(impl, run, cases):
    """With check=True every rank raises the same ValueError; what agrees is reduced."""

    def attempt(ctx, one: int, case: str) -> str:
        tensor, op = DIFFERENT[case][ctx.rank != one]
        try:
            impl.ring_all_reduce(tensor.to(ctx.device, copy=True), op, check=True)
        except ValueError as error:
            return str(error)
        return ""

    def body(ctx):
        said = [attempt(ctx, one, case) for one in range(ctx.world_size) for case in DIFFERENT]
        tensor = torch.ones(5, device=ctx.device)
        impl.ring_all_reduce(tensor, check=True)
        return said, tensor.cpu()

    worlds = cases(3, 2, 4, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        names = [f"{w} ranks, rank {one} passes {case}" for one in range(w) for case in DIFFERENT]
        for rank, (said, tensor) in enumerate(results):
            for name, text, first in zip(names, said, results[0][0], strict=True):
                if not text:
                    fail(f"{name}: no ValueError on rank {rank}", cause="accepted", rank=rank)
                expect_equal(text, first, what=f"{name}: the message", rank=rank, cause="messages")
            text = f"{w} ranks with equal tensors and check=True"
            expect_close(tensor, torch.full((5,), float(w)), what=text, rank=rank)


@exercise("3.3", "virtual")
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
