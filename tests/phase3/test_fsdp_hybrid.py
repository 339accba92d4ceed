"""Checks of exercise 3.19: bytes inside the node, bytes between nodes, and equal replicas."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import held_by
from tests.phase3.fsdp_models import (
    DEPTH,
    WHOLE,
    Stack,
    batch,
    compare_training,
    gradient_pieces,
    loss_of,
    merged_gradients,
    net,
    own_gradients,
    traced,
    train,
    use_of_freed_is_told,
)

SHAPES = ((4, 2), (6, 2), (6, 3), (4, 1), (2, 2))  # world size, ranks on a node


def wrap(impl, inner: nn.Module, units, node_size: int, prefetch: bool = False) -> nn.Module:
    inside, across = impl.node_groups(node_size)
    flat_type = partial(impl.HybridFlat, replicas=across)
    wrapper = impl.module("fsdp_prefetch").PrefetchFSDP if prefetch else impl.module("fsdp").FSDP
    return wrapper(inner, units, group=inside, flat_type=flat_type)


@exercise("3.19", "virtual gloo cuda", asserts="nodes-and-peers")
def test_groups_are_nodes_and_peers(impl, run, seed, cases):
    """Nodes hold neighbouring ranks; replicas have the same local rank."""

    def body(ctx, node_size):
        return [list(dist.get_process_group_ranks(g)) for g in impl.node_groups(node_size)]

    for world_size, size in cases((4, 2), (6, 2), (6, 3), (3, 1), (3, 3)):
        for rank, (inside, across) in enumerate(run(body, world_size, size)):
            first = rank // size * size
            what = f"{world_size} ranks, {size} on a node"
            nodes = list(range(first, first + size))
            peers = list(range(rank % size, world_size, size))
            expect_equal(inside, nodes, what=f"{what}: the node", rank=rank, cause="groups")
            expect_equal(across, peers, what=f"{what}: replicas", rank=rank, cause="groups")


@exercise("3.19", "virtual gloo cuda", asserts="mean-of-both replicas-equal parameters")
@use_of_freed_is_told()
def test_gradient_is_the_mean_over_all_ranks(impl, run, seed, cases):
    """Every replica has the mean of all ranks' gradients in its shards."""

    def body(ctx, node_size):
        inner = net(seed, ctx.device)
        model = wrap(impl, inner, inner.units(), node_size)
        loss_of(model, batch(seed, ctx.rank, device=ctx.device)).backward()
        return gradient_pieces(model)

    own = own_gradients(seed, range(6))
    for world_size, size in cases(*SHAPES):
        results = run(body, world_size, size)
        for first in range(0, world_size, size):
            got = merged_gradients(results[first : first + size])
            for name in own[0]:
                parts = [part[name] for part in own[:world_size]]
                expect_close(
                    got.get(name),
                    torch.stack(parts).mean(0),
                    what=f"nodes of {size}, {world_size} ranks: gradient of {name}",
                    rank=first,
                    contributions=parts,
                    rtol=1e-9,
                    atol=1e-10,
                )


@exercise("3.19", "virtual gloo", asserts="mean-of-both norm-of-group life")
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed):
    """Three steps with clipping and prefetching on two nodes of two ranks."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = wrap(impl, inner, inner.units(), 2, prefetch=True)
        return train(ctx, model, inner, seed, impl.module("fsdp").clip_by_global_norm)

    results = run(body, 4)
    compare_training(results, seed, "2 nodes of 2 ranks, 3 steps")
    for log in results.logs:
        log.all_waited()


@exercise("3.19", "virtual", asserts="bytes-across sharded resources cost")
@use_of_freed_is_told()
def test_bytes_inside_and_across(impl, run, seed):
    """Across nodes only all-reduces of chunks, 2(M-1)/M·P/L bytes; all else stays in the node."""

    def body(ctx, node_size):
        inner = Stack()
        model = wrap(impl, inner, list(inner.layers), node_size)
        optimizer = torch.optim.Adam(model.parameters())
        with ctx.region("step"):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return held_by(model, optimizer).total

    for world_size, size in ((8, 4), (6, 2)):
        nodes = world_size // size
        results = run(body, world_size, size)
        for log, held in zip(results.logs, results, strict=True):
            log = log.select(region="step")
            away = [e for e in log.events if len({r // size for r in e.group}) > 1]
            sent = sum(e.sent for e in away)
            padding = 4 * (DEPTH + 1) * world_size
            limit = 2 * (nodes - 1) / nodes * WHOLE / size + padding
            if sent > limit:
                fail(
                    f"rank {log.rank} sends {sent:,} B across {nodes} nodes of {size} ranks, "
                    f"expected at most {limit:,.0f} B = 2(M-1)/M·P/L: reduce inside the node first",
                    cause="too-many-bytes-across",
                    rank=log.rank,
                )
            formula = "3(L-1)/L·P inside, 2(M-1)/M·P/L across"
            log.sent_at_most(3 * (size - 1) / size * WHOLE + 3 * padding + limit, formula)
            state = 4 * WHOLE / size + 20 * (DEPTH + 1)
            if held > state + 8 * DEPTH:
                fail(
                    f"rank {log.rank} holds {held:,} B of state, expected {state:,.0f} B = 16Ψ/L",
                    cause="too-much-memory",
                    rank=log.rank,
                )


SIZES = (3, 6, 0, -1)


@exercise("3.19", "virtual", asserts="refused-sizes refused-replicas refusals")
def test_wrong_groups_are_refused(impl, run, seed):
    """A world that does not divide, other ranks' replicas, and one group for both: ValueError."""

    def divide(ctx):
        return [refusal(impl.node_groups, size) for size in SIZES]

    def made(*_: object, **__: object) -> None:
        raise RuntimeError("a group was made before the size was refused")

    def shard(ctx):
        others = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine, theirs = others[ctx.rank // 2], others[1 - ctx.rank // 2]
        types = [partial(impl.HybridFlat, replicas=group) for group in (theirs, mine)]
        wrapper = impl.module("fsdp").FSDP
        return [refusal(wrapper, net(seed), group=mine, flat_type=flat) for flat in types]

    def overlap(ctx):
        inside, across = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])
        flat = partial(impl.HybridFlat, replicas=across)
        if ctx.rank > 1:
            return [refusal(impl.node_groups, 0)]
        return [refusal(impl.module("fsdp").FSDP, net(seed), group=inside, flat_type=flat)]

    with mock.patch.object(dist, "new_group", made):
        expect_refused(run(divide, 5), [f"nodes of {size} for 5 ranks" for size in SIZES])
    expect_refused(run(shard, 4), ["foreign replicas", "replicas that are the node"])
    expect_refused(run(overlap, 4), ["groups that have two ranks in common"])


INSIDE = ((1, 2), (4, 5), (0, 3))  # two nodes of two, and a third one without replicas
ACROSS = ((1, 4), (2, 5), (0,), (3,))
NUMEL = {True: (2, 4), False: (3, 5)}  # by whether a rank has replicas: shapes


def gradient_of(seed: int, rank: int, turn: int) -> torch.Tensor | None:
    """Whole numbers, which any dtype adds exactly; rank 2 has none, and in turn 2 no rank has any.

    In turn 3 those of ranks 1 and 2, a node, are zeros, which their peers need all the same.
    """
    shape = NUMEL[rank not in INSIDE[2]]
    generator = torch.Generator().manual_seed(seed * 100 + rank * 10 + turn)
    gradient = torch.randint(-30, 30, shape, generator=generator).double()
    return None if turn == 2 else gradient * (rank != 2) * (turn != 3 or rank != 1)


def last_of(rank: int, turn: int) -> float:
    """The gradient of the last element."""
    return 0.0 if turn == 3 and rank in (1, 2) else 1.0


@exercise(
    "3.19",
    "virtual gloo",
    asserts="mean-of-both travels-beside waited-inside bytes-across nothing-sent sharded group "
    "dtype layout alone life cost",
)
def test_vectors_on_nodes_of_some_ranks(impl, run, seed):
    """Nodes [1, 2] and [4, 5], replicas across; 0 and 3 do other things: messages and means."""

    def one(ctx, inside, across, name):
        dtype = getattr(torch, name)
        shape = NUMEL[len(across.ranks) > 1]
        module, last = nn.Module(), len(ctx.ledger.events)
        weight = nn.Parameter(torch.ones(shape[::-1], dtype=dtype).t())
        more = nn.Parameter(torch.ones((), dtype=dtype))
        places = {weight: [(module, "weight", "weight")], more: [(module, "more", "more")]}
        flat = impl.HybridFlat(places, inside.group, ctx.device, replicas=across.group)
        found = []
        for turn in range(4):
            flat.start_gather()
            flat.finish_gather()
            flat.free()
            last = len(ctx.ledger.events)
            gradient = gradient_of(seed, ctx.rank, turn)
            if gradient is not None:
                flat.leaves[0].grad = None if ctx.rank == 2 else gradient.to(dtype)
                flat.leaves[1].grad = torch.tensor(last_of(ctx.rank, turn), dtype=dtype)
            flat.start_reduce()
            flying = [(e.op, e.group) for e in ctx.ledger.events[last:] if e.end is None]
            flat.finish_reduce()
            new = ctx.ledger.events[last:]
            sent = [sum(e.sent for e in new if e.group == g.ranks) for g in (inside, across)]
            mean = flat.shard.grad
            found.append((flying, sent, len(new), None if mean is None else mean.clone()))
        return found

    def body(ctx):
        groups = [[Named(ranks) for ranks in kind] for kind in (INSIDE, ACROSS)]
        inside, across = (next(g for g in kind if ctx.rank in g.ranks) for kind in groups)
        return [one(ctx, inside, across, name) for name in ("float64", "bfloat16")]

    for rank, every in enumerate(run(body, 6)):
        for name, found in zip(("float64", "bfloat16"), every, strict=True):
            judge_vector(found, seed, rank, name)


class Named:
    """A group and its ranks; every rank makes every one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.group = ranks, dist.new_group(list(ranks))


def judge_vector(found, seed: int, rank: int, name: str) -> None:
    inside, across = (next(r for r in kind if rank in r) for kind in (INSIDE, ACROSS))
    ranks = INSIDE[2] if rank in INSIDE[2] else INSIDE[0] + INSIDE[1]
    rows, columns = NUMEL[len(across) > 1]
    chunk = -(-(rows * columns + 1) // 2)
    mine = slice(inside.index(rank) * chunk, (inside.index(rank) + 1) * chunk)
    nbytes = chunk * getattr(torch, name).itemsize
    where = f"{name}, node {inside}, replicas {across}"
    total = torch.zeros(1, dtype=torch.float64)
    for turn, (flying, sent, count, mean) in enumerate(found):
        what = f"{where}, reduction {turn + 1}"
        if turn == 2:
            text = f"{what}: messages without any gradient"
            expect_equal(count, 0, what=text, rank=rank, cause="messages")
        elif any(group == inside for _, group in flying):
            text = f"{what}: {flying[0][0]} inside the node is under way after start_reduce"
            fail(text, cause="not-waited", rank=rank)
        elif len(across) > 1 and not any(group == across for _, group in flying):
            text = f"{what}: nothing crosses the network when start_reduce returns: it is issued "
            fail(f"{text}later, or waited for at once", cause="waited-at-once", rank=rank)
        if turn != 2:
            limits = [nbytes, 2 * (len(across) - 1) * nbytes // len(across) + 2 * len(across) * 8]
            if sent[0] > limits[0] or sent[1] > limits[1]:
                text = f"{what}: rank {rank} sends {sent[0]} B inside and {sent[1]} B across, "
                text += f"expected at most {limits[0]} and {limits[1]}"
                fail(text, cause="too-many-bytes", rank=rank)
            parts = [
                torch.cat(
                    [gradient_of(seed, r, turn).flatten(), torch.tensor([last_of(r, turn)])]
                ).double()[mine]
                for r in ranks
            ]
            total = total + torch.stack(parts).mean(0)
        what = f"{what}: mean of ranks {ranks}"
        if mean is not None and str(mean.dtype) != f"torch.{name}":
            fail(f"{what}: {mean.dtype}, expected {name}", cause="dtype", rank=rank)
        got = mean if mean is None else mean.double()
        known = {"contributions": parts} if turn == 0 else {}
        expect_close(got, total, what=what, rank=rank, rtol=1e-9, atol=1e-9, **known)


@trace("3.19", measures="hidden")
def trace_hybrid(impl):
    """Two steps of a small GPT on two nodes of two ranks."""
    return traced(lambda inner, units: wrap(impl, inner, units, 2, prefetch=True))
