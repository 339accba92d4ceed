"""Checks of exercise 3.19: what stays in the node, what leaves it, and that replicas agree."""

from __future__ import annotations

from functools import partial

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


@exercise("3.19", "virtual gloo cuda")
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


@exercise("3.19", "virtual gloo cuda")
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


@exercise("3.19", "virtual gloo")
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


@exercise("3.19", "virtual")
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


@exercise("3.19", "virtual")
def test_wrong_groups_are_refused(impl, run, seed):
    """A world that does not divide, replicas of others, and one group for both: ValueError."""

    def divide(ctx):
        return [refusal(impl.node_groups, size) for size in (3, 0)]

    def shard(ctx):
        others = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine, theirs = others[ctx.rank // 2], others[1 - ctx.rank // 2]
        types = [partial(impl.HybridFlat, replicas=group) for group in (theirs, mine)]
        wrapper = impl.module("fsdp").FSDP
        return [refusal(wrapper, net(seed), group=mine, flat_type=flat) for flat in types]

    expect_refused(run(divide, 5), [("nodes of 3 for 5 ranks", [5, 3]), ("nodes of 0", [5, 0])])
    expect_refused(run(shard, 4), [("foreign replicas", []), ("replicas that are the node", [])])


@trace("3.19")
def trace_hybrid(impl):
    """Two steps of a small GPT on two nodes of two ranks."""
    return traced(lambda inner, units: wrap(impl, inner, units, 2, prefetch=True))
