"""Checks of exercise 3.5: trees (values, messages, time)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    OPS,
    WIRE,
    N,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_layouts,
    check_memory,
    check_not_finite,
    check_refusals,
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


@exercise("3.5", "virtual gloo cuda", asserts="reduce any-tensor dtype alone")
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
    """The reduction on ``root``, the input on all other ranks."""
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


@exercise("3.5", "virtual gloo cuda", asserts="broadcast any-tensor dtype")
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


@exercise(
    "3.5", "virtual gloo cuda", nccl=True, asserts="all-reduce same-bits any-tensor dtype alone"
)
def test_tree_all_reduce_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, in place, the same bits on every rank."""
    call = lambda tensor, op: impl.tree_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 6, 1, 2, 5), call)


NAMES = ("tree_reduce", "tree_broadcast", "tree_all_reduce")


@exercise("3.5", "virtual gloo cuda", asserts="messages tree cost")
def test_tree_sends_w_minus_1_messages_each_way(impl, run, cases):
    """W-1 messages of N bytes in all, up and down the tree's links."""

    def call(ctx, tensor):
        for name in NAMES:
            with ctx.region(f"{name} {tensor.dtype}"):
                getattr(impl, name)(tensor.clone())

    def body(ctx):
        for dtype in WIRE:
            call(ctx, distinct(ctx, dtype))

    worlds = cases(4, 2, 3, 8)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        for name, ways in zip(NAMES, (1, 1, 2), strict=True):
            for dtype, size in WIRE.items():
                logs = [log.select(region=f"{name} {dtype}") for log in results.logs]
                for log in logs:
                    sends = len(log.select("send").events)
                    check_bytes(log, N * sends, sends, "N for each message", size)
                    check_links(log, name, w)
                check_counts(logs, ways * (w - 1), name, w)


def links(rank: int, root: int, w: int) -> tuple[int | None, list[int]]:
    """(parent, children), by counting bits of the numbers from the root on."""
    number = (rank - root) % w
    children, bit = [], 1
    while number + bit < w and not number & bit:
        children.append((number + bit + root) % w)
        bit *= 2
    while number and not number & bit and bit < w:
        bit *= 2
    return ((number - bit + root) % w if number else None), children


def check_links(log, name: str, w: int) -> None:
    """Messages go to the parent and come from the children, or the other way round."""
    parent, children = links(log.rank, 0, w)
    up = [] if parent is None else [("send", parent)]
    up += [("recv", child) for child in children]
    down = [("recv" if op == "send" else "send", peer) for op, peer in up]
    want = up if name == "tree_reduce" else down
    got = [(event.op, event.peer) for event in log.events]
    if name != "tree_all_reduce" and sorted(got) != sorted(want):  # there any root will do
        text = ", ".join(f"{op} with rank {peer}" for op, peer in got) or "nothing"
        fail(
            f"{name} over {w} ranks, rank {log.rank} has parent {parent} and children {children}, "
            f"but its messages are: {text}",
            cause="not-a-tree",
            rank=log.rank,
        )


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


@exercise("3.5", "virtual", asserts="time cost")
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


def calls(impl):
    """(call, its result) of the three, with rank 1 as the root."""
    at_root = lambda rows, rank, op: (slice(None), OPS[op](rows) if rank == 1 else rows[rank])
    of_root = lambda rows, rank, op: (slice(None), rows[1])
    return {
        lambda t, op="sum", g=None: impl.tree_reduce(t, 1, op, g): at_root,
        lambda t, op="sum", g=None: impl.tree_broadcast(t, 1, g): of_root,
        lambda t, op="sum", g=None: impl.tree_all_reduce(t, op, g): whole,
    }


@exercise("3.5", "virtual", asserts="any-tensor layout leaf nan")
def test_trees_on_views(impl, run, seed):
    """Any strides: worked on in place, and nothing beside the tensor changes."""
    for call, want in calls(impl).items():
        check_layouts(run, seed, call, want)
        check_not_finite(run, call, want)


@exercise("3.5", "virtual", asserts="group refused refusals life")
def test_trees_in_groups(impl, run, seed):
    """Roots are ranks of the group; bad roots and arguments are refused before any message."""
    for call, want in calls(impl).items():
        check_subgroup(run, seed, call, want)
    wrong = bad_arguments(lambda t, op: impl.tree_all_reduce(t, op))
    reduce = bad_arguments(lambda t, op: impl.tree_reduce(t, 0, op))
    wrong |= {f"tree_reduce: {what}": call for what, call in reduce.items()}
    for root in (-1, 2):
        wrong |= {
            f"a reduction to root {root}": lambda r=root: impl.tree_reduce(torch.ones(3), r),
            f"a broadcast from root {root}": lambda r=root: impl.tree_broadcast(torch.ones(0), r),
        }
    check_refusals(run, wrong)


@exercise("3.5", "virtual", asserts="links")
def test_links_of_the_tree(impl, run):
    """Parent and children of every rank of one to nine, for every root."""
    cases = [(rank, root, w) for w in range(1, 10) for root in range(w) for rank in range(w)]

    def body(ctx):
        found = [impl.tree_links(*case) for case in cases]
        return [(parent, [*children]) for parent, children in found]

    for (rank, root, w), got in zip(cases, run(body, 1, process_group=False)[0], strict=True):
        what = f"(parent, children) of rank {rank} of {w}, root {root}"
        expect_equal(got, links(rank, root, w), what=what, cause="wrong-links")


@exercise("3.5", "virtual", asserts="memory resources")
def test_trees_need_little_memory(impl, run):
    """No tensor for a broadcast, a few for a reduction; nothing is kept."""
    for name, tensors in zip(NAMES, (9, 0, 9), strict=True):
        call = lambda tensor, name=name: getattr(impl, name)(tensor)
        what = f"{name}: {tensors} of its size"
        check_memory(run, 8, LARGE, call, tensors * 4 * LARGE, what)


@exercise("3.5", "virtual", asserts="climb")
def test_climb_reduces_into_the_root(impl, run, seed):
    """The flat tensor of the root holds the reduction, in a group whose ranks are not global."""

    def body(ctx):
        group = dist.new_group([1, 2, 3])
        if ctx.rank == 0:
            return None
        total = values_of(seed, 4, 5)[ctx.rank]
        impl.climb(total, 1, "mean", group)
        return total

    want = OPS["mean"](values_of(seed, 4, 5)[1:])
    expect_close(run(body, 4)[2], want, what="the mean on rank 1 of the group", rank=2)


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
