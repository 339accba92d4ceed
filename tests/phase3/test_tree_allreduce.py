"""Checks of exercise 3.5: trees (values, messages, time)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_close, fail, trace
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    OPS,
    N,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_refusals,
    check_strided,
    check_subgroup,
    check_time,
    distinct,
    named,
    reduced,
    values_of,
    warm_and_drawn,
    whole,
)

LARGE = 10_080
TENSOR = ALPHA + 4 * LARGE * BETA  # one message of the whole tensor


def rounds(world_size: int) -> int:
    """⌈log₂ W⌉"""
    return (world_size - 1).bit_length()


@exercise("3.5", "virtual gloo cuda")
def test_tree_reduces_to_any_root(impl, run, seed, cases):
    """The root has the sum, mean or maximum; the other ranks' tensors keep their values."""
    call = lambda tensor, op: impl.tree_reduce(tensor, root_for(tensor), op)
    worlds = cases(3, 6, 1, 2, 5)
    for w, inputs in reduced(run, seed, worlds, call):
        for case, tensors in inputs:
            check_root_only(tensors, values_of(seed, w, *case[1:]), case, case[1] % w)


def root_for(tensor: torch.Tensor) -> int:
    """Another root for each length."""
    return tensor.numel() % dist.get_world_size()


def check_root_only(tensors, rows: torch.Tensor, case, root: int) -> None:
    """The reduction on ``root``, the input on all others."""
    text = f"{named(case, len(rows))} to root {root}"
    sums = list(rows) if case[0] != "max" else []
    want = OPS[case[0]](rows)
    before = rows[root] if len(rows) > 1 else None
    expect_close(tensors[root], want, what=text, rank=root, before=before, contributions=sums)
    for rank, got in enumerate(tensors):
        if rank != root and not torch.equal(got, rows[rank]):
            fail(
                f"{text}: the tensor of rank {rank} has changed; add up in a copy",
                cause="others-changed",
                rank=rank,
            )


@exercise("3.5", "virtual gloo cuda")
def test_tree_broadcasts_from_any_root(impl, run, seed, cases):
    """Every rank has the root's values."""
    call = lambda tensor, op: impl.tree_broadcast(tensor, root_for(tensor))
    worlds = cases(3, 6, 1, 2, 5)
    for w, inputs in reduced(run, seed, worlds, call):
        for case, tensors in inputs:
            rows, root = values_of(seed, w, *case[1:]), case[1] % w
            for rank, got in enumerate(tensors):
                expect_close(
                    got,
                    rows[root],
                    what=f"broadcast of {case[1]} elements from {root} to {w} ranks",
                    rank=rank,
                    before=rows[rank] if rank != root else None,
                )


@exercise("3.5", "virtual gloo cuda")
def test_tree_all_reduce_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, in place, the same bits on every rank."""
    call = lambda tensor, op: impl.tree_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 6, 1, 2, 5), call)


@exercise("3.5", "virtual gloo cuda")
def test_tree_sends_w_minus_1_messages_each_way(impl, run, cases):
    """W-1 messages of N bytes in all, up and down; no rank sends or receives more than log₂ W."""

    def body(ctx):
        for name in ("tree_reduce", "tree_broadcast", "tree_all_reduce"):
            with ctx.region(name):
                getattr(impl, name)(distinct(ctx))

    worlds = cases(4, 2, 3, 8)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        for name, ways in (("tree_reduce", 1), ("tree_broadcast", 1), ("tree_all_reduce", 2)):
            logs = [log.select(region=name) for log in results.logs]
            for log in logs:
                sends = len(log.select("send").events)
                check_bytes(log, N * sends, sends, "N for each message")
            check_counts(logs, ways * (w - 1), name, w)


def check_counts(logs, total: int, name: str, w: int) -> None:
    messages = [log.messages for log in logs]
    if sum(messages) != total:
        fail(
            f"{name} over {w} ranks: {sum(messages)} messages in all, a tree has {total}",
            cause="too-many-messages" if sum(messages) > total else "too-few-messages",
        )
    busiest = max(range(w), key=lambda rank: len(logs[rank].events))
    ends = 2 * rounds(w)  # a rank's links, once each way
    if len(logs[busiest].events) > ends:
        fail(
            f"{name} over {w} ranks: rank {busiest} has {len(logs[busiest].events)} messages, in a "
            f"binomial tree at most {ends}",
            cause="not-a-tree",
            rank=busiest,
        )


@exercise("3.5", "virtual")
def test_tree_takes_log_w_rounds(impl, run):
    """⌈log₂ W⌉·(α + Nβ) of virtual time each way, from and to any root."""

    def body(ctx, name, *root):
        getattr(impl, name)(torch.ones(LARGE), *root)

    for w in (2, 3, 6, 8):
        for name in ("tree_reduce", "tree_broadcast"):
            seconds = rounds(w) * TENSOR
            call = lambda ctx: body(ctx, name, 1)
            check_time(run, call, w, seconds, f"{name}: ⌈log₂ W⌉·(α + Nβ)")
        call = lambda ctx: body(ctx, "tree_all_reduce")
        check_time(run, call, w, 2 * rounds(w) * TENSOR, "2⌈log₂ W⌉·(α + Nβ)")


@exercise("3.5", "virtual")
def test_trees_on_views_and_in_groups(impl, run, seed):
    """Strided views and sub-groups; bad roots and arguments are refused before anything is sent."""
    at_root = lambda rows, rank: (slice(None), rows.sum(0) if rank == 1 else rows[rank])
    of_root = lambda rows, rank: (slice(None), rows[1])
    check_strided(run, seed, lambda t: impl.tree_reduce(t, 1), at_root)
    check_strided(run, seed, lambda t: impl.tree_broadcast(t, 1), of_root)
    check_strided(run, seed, lambda t: impl.tree_all_reduce(t), whole)
    check_subgroup(run, seed, lambda t, g: impl.tree_reduce(t, 1, group=g), at_root)
    check_subgroup(run, seed, lambda t, g: impl.tree_broadcast(t, 1, g), of_root)
    check_subgroup(run, seed, lambda t, g: impl.tree_all_reduce(t, group=g), whole)
    wrong = bad_arguments(lambda t, op: impl.tree_all_reduce(t, op))
    for root in (-1, 2):
        wrong |= {
            f"a reduction to root {root}": lambda r=root: impl.tree_reduce(torch.ones(3), r),
            f"a broadcast from root {root}": lambda r=root: impl.tree_broadcast(torch.ones(3), r),
        }
    check_refusals(run, wrong)


@trace("3.5")
def trace_trees(impl):
    """Reduction, broadcast and both together of 8 MB."""

    def body(ctx):
        tensor = torch.ones(2_000_000)
        for _ in warm_and_drawn(ctx):
            for name in ("tree_reduce", "tree_broadcast", "tree_all_reduce"):
                with ctx.region(name):
                    getattr(impl, name)(tensor)
                dist.barrier()

    return body
