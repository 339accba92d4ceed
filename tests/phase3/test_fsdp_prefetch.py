"""Checks of exercise 3.16: messages beside compute, in the right order, and never too many."""

from __future__ import annotations

import time
from itertools import pairwise

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.fsdp_branches import PLANS, change_often, changing
from tests.phase3.fsdp_models import (
    ROOT,
    UNIT,
    Stack,
    compare_training,
    net,
    traced,
    train,
    use_of_freed_is_told,
    values_of,
)
from tests.phase3.fsdp_states import check_begins_anew

DEPTH = 12
WHOLE = DEPTH * UNIT + ROOT
WORLD = 4
TURNED = ", the order turned around since the last forward: every guess is wrong"
LESS = ", without the unit that was expected last"
DROPPED = ", where every second unit's output is not used"
SLACK = 10_000  # bytes of activations of one sample, and of what is in hand


def stack(seed: int) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(depth=DEPTH)


def step(model: nn.Module) -> None:
    """One training step without an optimizer."""
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()


@exercise("3.16", "virtual gloo cuda", asserts="values parameters")
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed, cases):
    """Clipping, accumulation, evaluation between the steps: the same as one process."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.PrefetchFSDP(inner, [] if ctx.world_size == 2 else inner.units())
        return train(ctx, model, inner, seed, impl.module("fsdp").clip_by_global_norm)

    sizes = cases(3, 2, 4, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for log in results.logs:
            log.all_waited()
        compare_training(results, seed, f"{world_size} ranks, 3 steps")


@exercise("3.16", "virtual gloo", asserts="ahead own-first order-given order-learnt one-ahead cost")
@use_of_freed_is_told()
def test_next_unit_is_on_its_way(impl, run, seed):
    """While a unit computes, the next one's all-gather is issued already; the order is learnt."""

    def one(ctx, learnt):
        inner = stack(seed)
        units = list(inner.layers)
        model = impl.PrefetchFSDP(inner, units[::-1] if learnt else units)
        issued: dict[str, list[int]] = {"forward": [], "backward": []}
        if learnt == "a training step":
            for layers in (units[::-1], units):  # the last order counts, no earlier one
                inner.layers = nn.ModuleList(layers)
                step(model)
        if learnt == "an evaluation":
            with torch.no_grad():
                model(torch.ones(1, 2))
        start = 0

        def tell(point: str) -> None:
            nonlocal start
            count = sum(e.op == "all_gather" for e in ctx.ledger.events)
            if point == "backward" and not issued["backward"]:
                start = issued["forward"][-1]
            issued[point].append(count if point == "forward" else count - start)

        for layer in inner.layers:
            layer.tell = tell
        before = sum(e.op == "all_gather" for e in ctx.ledger.events)
        step(model)
        gathers = [e.numel for e in ctx.ledger.events if e.op == "all_gather"]
        own = gathers[before : before + 2]
        return [count - before for count in issued["forward"]], issued["backward"], own

    ways = ("", "a training step", "an evaluation")

    def body(ctx):
        return [one(ctx, learnt) for learnt in ways]

    for rank, found in enumerate(run(body, 3)):
        for learnt, (forward, back, first) in zip(ways, found, strict=True):
            which = f"units given backwards, after {learnt}" if learnt else "the first step"
            sizes = [-(-nbytes // 4 // 3) for nbytes in (ROOT, UNIT)]
            if first != sizes:
                text = f"{which}: the first two all-gathers of rank {rank} have {first} elements, "
                text += f"expected {sizes}: the root's own before the next unit's"
                fail(text, cause="next-before-own", rank=rank)
            # forward of layer k: root, layers 0 … k and the next; backward: the last one was kept
            for k, count in enumerate(forward):
                judge("forward", k, count, min(k + 3, DEPTH + 1), rank, which)
            for k, count in enumerate(back):
                judge("backward", DEPTH - 1 - k, count, min(k + 1, DEPTH - 1), rank, which)


def judge(pass_name: str, layer: int, count: int, want: int, rank: int, which: str) -> None:
    what = f"{which}: when the {pass_name} of unit {layer} of {DEPTH} computes, rank {rank} "
    what += "has issued"
    if count < want:
        fail(
            f"{what} {count} all-gathers in this {pass_name}, expected {want}: the next unit is "
            "not on its way",
            cause="no-prefetch",
            rank=rank,
        )
    if count > want:
        fail(
            f"{what} {count} all-gathers in this {pass_name}, expected {want}: more than one unit "
            "ahead, or one that was there already",
            cause="too-early",
            rank=rank,
        )


@exercise("3.16", "virtual", asserts="beside-compute cost")
@use_of_freed_is_told()
def test_communication_hides_behind_compute(impl, run, seed):
    """Units whose compute takes longer than their messages: little of the
    virtual time is exposed."""
    forward, back = 1e-3, 2e-3  # seconds of each unit

    def body(ctx):
        inner = stack(seed)
        model = impl.PrefetchFSDP(inner, list(inner.layers))
        step(model)
        for layer in inner.layers:
            layer.tell = lambda point: time.sleep(forward if point == "forward" else back)
        with ctx.region("step"):
            begin = time.perf_counter()
            step(model)
            return time.perf_counter() - begin

    results = run(body, WORLD)
    for rank, (seconds, log) in enumerate(zip(results, results.logs, strict=True)):
        exposed = seconds - DEPTH * (forward + back)
        each = [e.end - e.start for e in log.select(region="step").events]
        most = 8 * sum(each) / len(each)
        if exposed > most:
            fail(
                f"rank {rank} waits {1e3 * exposed:.2f} ms of a step for {len(each)} messages of "
                f"{1e3 * sum(each) / len(each):.2f} ms on average; {1e3 * most:.2f} ms should do: "
                "the first, the last and the root's",
                cause="exposed",
                rank=rank,
            )


@exercise("3.16", "virtual gloo", asserts="kept cost")
@use_of_freed_is_told()
def test_last_unit_and_root_are_gathered_once(impl, run, seed):
    """The bytes of a step: 3(W-1)/W·P, less one all-gather of the root and of the last unit."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PrefetchFSDP(inner, list(inner.layers))
        step(model)
        model.eval()  # what counts is autograd, not this
        with ctx.region("step"):
            step(model)

    for log in run(body, WORLD).logs:
        log = log.select(region="step")
        share = (WORLD - 1) / WORLD
        padding = 3 * 4 * (DEPTH + 1) * WORLD
        formula = "(W-1)/W·(3P - P_root - P_last): what backward begins with is still there"
        log.sent_at_most(share * (3 * WHOLE - ROOT - UNIT) + padding, formula)
        log.sent_at_least(share * (3 * WHOLE - ROOT - UNIT) - padding, formula)


@exercise("3.16", "virtual", asserts="one-ahead kept-not-without-autograd resources")
@use_of_freed_is_told()
def test_one_unit_ahead_and_no_more(impl, run, seed):
    """Live bytes: two units in full, and two vectors of gradients in backward; wrong guesses."""

    def body(ctx):
        points: dict[str, int] = {}
        where = ""

        def tell(point: str) -> None:
            point += where
            points[point] = max(points.get(point, 0), memory.current)

        with PeakMemory() as memory:
            inner = stack(seed)
            model = impl.PrefetchFSDP(inner, list(inner.layers))
            for layer in inner.layers:
                layer.tell = tell
            for _ in range(2):
                step(model)
                tell("after backward")
            model.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 2))
            tell("after evaluation")
            *layers, last = inner.layers
            inner.layers, where = nn.ModuleList([*layers[::-1], last]), TURNED
            step(model)
            model.zero_grad()
            inner.layers, where = nn.ModuleList(layers), LESS
            loss = model(torch.ones(1, 2)).sum()
            tell("after forward")
            loss.backward()
            inner.layers = nn.ModuleList([*layers, last])
            inner.dropped, where = frozenset(range(1, DEPTH, 2)), DROPPED
            step(model)
        return points

    shards = WHOLE / WORLD + SLACK
    limits = {
        "forward" + TURNED: shards + ROOT + 2 * UNIT,
        "after forward" + LESS: shards + ROOT,
        "backward" + TURNED: 2 * shards + 2 * ROOT + 4 * UNIT,
        "backward" + DROPPED: 2 * shards + 2 * ROOT + 4 * UNIT,
        "forward": shards + ROOT + 2 * UNIT,
        "backward": 2 * shards + 2 * ROOT + 4 * UNIT,
        "after backward": 2 * shards,
        "after evaluation": shards,
    }
    for rank, points in enumerate(run(body, WORLD)):
        for point, limit in limits.items():
            if points.get(point, 0) > limit:
                fail(
                    f"{point}: rank {rank} has {points[point]:,} B of tensors, expected at most "
                    f"{limit:,.0f} B (all {DEPTH} units: {WHOLE:,} B). More than one unit ahead, "
                    "or something was not freed",
                    cause="never-freed",
                    rank=rank,
                )


def in_full(model: nn.Module) -> int:
    """Bytes of the vectors that are gathered."""
    return sum(f.full.untyped_storage().nbytes() for u in model.units for f in u.flats)


@exercise(
    "3.16", "virtual", asserts="one-reduction done-after-backward kept-not-without-autograd cost"
)
@use_of_freed_is_told()
def test_one_reduction_is_under_way(impl, run, seed):
    """A unit's reduce-scatter is waited for when the next one's is issued, and not before."""

    def body(ctx):
        inner = stack(seed)
        # what comes first has inputs that need no gradient: only the end of backward tells of it
        model = impl.PrefetchFSDP(inner, [inner.inside, *inner.layers])
        waiting: list[int] = []

        def under_way() -> int:
            mine = [e for e in ctx.ledger.events if e.op == "reduce_scatter"]
            return sum(e.end is None for e in mine)

        for layer in inner.layers:
            layer.tell = lambda point: waiting.append(under_way()) if point == "backward" else None
        step(model)
        left = sum(e.end is None for e in ctx.ledger.events)
        full = in_full(model)
        with torch.no_grad():
            model(torch.ones(1, 2))
        return waiting, left, full, in_full(model)

    results = run(body, 3)
    for rank, (waiting, left, full, evaluated) in enumerate(results):
        sums = results.logs[rank].select("reduce_scatter").events
        if any(a.end is None or a.end > b.start for a, b in pairwise(sums)):
            text = f"rank {rank} issues a reduce-scatter while the one before is under way"
            fail(text, cause="too-many-under-way", rank=rank)
        for k, count in enumerate(waiting):
            if count > 1:
                text = f"when the backward of unit {DEPTH - 1 - k} of {DEPTH} computes, rank "
                text += f"{rank} has {count} reduce-scatters under way, expected at most one"
                fail(text, cause="too-many-under-way", rank=rank)
        if sum(waiting) < DEPTH - 1:  # before the last unit's backward there is none
            text = f"rank {rank} has a reduce-scatter under way beside {sum(waiting)} of {DEPTH} "
            text += f"units, expected {DEPTH - 1}: it is waited for at once"
            fail(text, cause="waited-at-once", rank=rank)
        if left or full:
            text = f"after backward rank {rank} has {left} messages under way, {full:,} B in full"
            fail(text, cause="left-over", rank=rank)
        if evaluated:
            text = f"after an evaluation rank {rank} has {evaluated:,} B of parameters in full: "
            fail(f"{text}without autograd nothing stays", cause="left-over", rank=rank)


@exercise("3.16", "virtual", asserts="anew values life alone")
@use_of_freed_is_told()
def test_next_forward_begins_anew(impl, run, seed):
    """After a forward, then a backward that raised on all ranks: fresh values, right gradients."""
    check_begins_anew(run, seed, lambda inner: impl.PrefetchFSDP(inner, list(inner.blocks)))


@exercise("3.16", "virtual", asserts="guess-costs-no-value order-learnt guesses-freed group life")
def test_wrong_guesses_cost_no_value(impl, run, seed):
    """In a group: the order of units changes with every forward, also before a backward."""

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        inner = changing(seed)
        with PeakMemory() as memory:
            model = impl.PrefetchFSDP(inner, inner.units(), group=groups[ctx.rank % 2 == 0])
            got = change_often(model, inner, seed, range(ctx.rank, ctx.rank + 1))
            held = []
            for plan in (PLANS[0], (0,), PLANS[1]):
                inner.plan = plan
                values_of(model, inner)
                held.append(memory.current)
        return got, held

    want = []
    for ranks in (range(0, 4, 2), range(1, 4, 2)):
        alone = changing(seed)
        want.append(change_often(alone, alone, seed, ranks))
    results = run(body, 4)
    for rank, (got, held) in enumerate(results):
        if max(held) > held[0]:
            fail(
                f"rank {rank} holds {held[0]} B after evaluating units {PLANS[0]}, but {max(held)} "
                "B after others. A unit that was gathered on a wrong guess was not freed",
                cause="never-freed",
                rank=rank,
            )
        for name, value in want[rank % 2].items():
            what = f"{name} after steps with the units {PLANS}"
            expect_close(got[name], value, what=what, rank=rank, rtol=1e-6, atol=1e-8)
    for log in results.logs:
        log.all_waited()


@trace("3.16", measures="hidden")
def trace_prefetch(impl):
    """Two steps of a small GPT, a unit for each block."""
    return traced(lambda *args: impl.PrefetchFSDP(*args))
