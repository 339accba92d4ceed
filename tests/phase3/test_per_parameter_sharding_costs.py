"""Checks of exercise 3.32: memory, bytes, messages beside compute, and wrong calls."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, held_by
from tests.phase3.fsdp_memory import expect_within
from tests.phase3.fsdp_models import (
    DEPTH,
    ROOT,
    UNIT,
    WHOLE,
    Stack,
    batch,
    loss_of,
    net,
    traced,
    use_of_freed_is_told,
)

WORLD = 4
SLACK = 10_000  # bytes of activations of one sample, and of what is in hand


def stack(seed: int) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack()


def padded(module: nn.Module, world_size: int) -> int:
    """Bytes of a module's parameters in messages: each padded to rows for all ranks."""
    rows = [(-(-len(p) // world_size) * world_size, p) for p in module.parameters()]
    return sum(n * (p.nbytes // len(p)) for n, p in rows)


@exercise("3.32", "virtual gloo", asserts="memory shard resources")
@use_of_freed_is_told()
def test_state_is_one_part_of_w(impl, run, seed):
    """Parameters, gradients and Adam's moments take 16Ψ/W bytes on every rank."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PerParameterFSDP(inner, list(inner.layers))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        held = held_by(model, optimizer)
        return [held.parameters, held.gradients, held.optimizer]

    for world_size, results in zip((4, 2), run.worlds(body, (4, 2)), strict=True):
        share = padded(stack(seed), world_size) / world_size
        counts = 4 * len(list(stack(seed).parameters()))  # a step count for each parameter
        limits = share, share, 2 * share + counts
        for rank, held in enumerate(results):
            for kind, got, limit in zip(
                ("parameters", "gradients", "optimizer state"), held, limits, strict=True
            ):
                if got > limit:
                    fail(
                        f"rank {rank} of {world_size} holds {got:,} B of {kind}, its rows are "
                        f"{limit:,.0f} B of {WHOLE:,} B of parameters. Not cut evenly, or a shard "
                        "keeps a larger tensor alive",
                        cause="too-much-memory",
                        rank=rank,
                    )


@exercise("3.32", "virtual", asserts="freed one-ahead kept resources")
@use_of_freed_is_told()
def test_full_parameters_live_for_one_unit(impl, run, seed):
    """Live bytes while a unit computes and after each pass, also where backward skips units."""

    def body(ctx):
        points: dict[str, int] = {}

        def tell(point: str) -> None:
            points[point] = max(points.get(point, 0), memory.current)

        with PeakMemory() as memory:
            inner = stack(seed)
            model = impl.PerParameterFSDP(inner, list(inner.layers))
            tell("after wrapping")
            for layer in inner.layers:
                layer.tell = tell
            for dropped in ((), (), (1, 3, DEPTH - 1)):
                inner.dropped = frozenset(dropped)
                model.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                tell("after forward")
                loss.backward()
                del loss
                tell("after backward")
            model.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 2))
            tell("after evaluation")
        return points

    shards = padded(stack(seed), WORLD) / WORLD + SLACK
    limits = {
        "after wrapping": shards,
        "forward": shards + ROOT + 2 * UNIT + UNIT / WORLD,
        "after forward": shards + ROOT,
        "backward": 2 * shards + 2 * ROOT + 4 * UNIT,
        "after backward": 2 * shards,
        "after evaluation": shards,
    }
    expect_within(run(body, WORLD), limits)


@exercise("3.32", "virtual gloo", asserts="cost gather-bytes reduce-bytes freezing kept once")
@use_of_freed_is_told()
def test_bytes_of_a_step(impl, run, seed):
    """Exactly (W-1)/W·(3P - P_root), in three messages per unit; frozen parameters a third less."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PerParameterFSDP(inner, list(inner.layers))
        inner.layers[1].requires_grad_(False)
        inner.layers[2].linear.bias.requires_grad_(False)
        with ctx.region("step"):
            model(torch.ones(1, 2)).sum().backward()

    world_size, alone = 3, stack(seed)
    unit, bias = padded(alone.layers[0], world_size), 66 * 4  # 64 rows become 66
    root = padded(alone, world_size) - DEPTH * unit
    passed = 3 * DEPTH * unit + 2 * root - unit - bias
    sent = (world_size - 1) * passed // world_size
    for log in run(body, world_size, delays=True).logs:
        log = log.select(region="step")
        log.all_waited()
        log.sent_at_most(sent, "(W-1)/W·(3P - P_root), less what is frozen")
        log.sent_at_least(sent, "(W-1)/W·(3P - P_root), less what is frozen")
        most = 3 * (DEPTH + 1) - 2  # the root is gathered once, a frozen unit not reduced
        if log.messages > most:
            fail(
                f"rank {log.rank} issued {log.messages} collectives in a step, {most} are enough "
                f"for {DEPTH + 1} units: join the parameters of a unit",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("3.32", "virtual", asserts="in-flight one-ahead one-reduction done cost")
@use_of_freed_is_told()
def test_messages_travel_beside_compute(impl, run, seed):
    """While a unit computes, one gather and one earlier reduce-scatter are under way, no more."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PerParameterFSDP(inner, list(inner.layers))
        found: list[list[int]] = []

        def tell(point: str) -> None:
            flying = [e.op for e in ctx.ledger.events if e.end is None]
            gathers = sum(e.op == "all_gather" for e in ctx.ledger.events)
            found.append([flying.count("all_gather"), flying.count("reduce_scatter"), gathers])

        for layer in inner.layers:
            layer.tell = tell
        model(torch.ones(1, 2)).sum().backward()
        left = sum(e.end is None for e in ctx.ledger.events)
        inner = stack(seed)
        # what comes first has inputs that need no gradient: only the end of backward tells of it
        model = impl.PerParameterFSDP(inner, [inner.inside, *inner.layers])
        model(torch.ones(1, 2)).sum().backward()
        return found, left

    last = DEPTH - 1
    forward = [[int(k < last), 0, min(k + 3, DEPTH + 1)] for k in range(DEPTH)]
    back = [[int(k < last), int(k > 0), min(DEPTH + 3 + k, 2 * DEPTH + 1)] for k in range(DEPTH)]
    places = [f"forward of unit {k}" for k in range(DEPTH)]
    places += [f"backward of unit {last - k}" for k in range(DEPTH)]
    results = run(body, 3)
    for rank, (found, left) in enumerate(results):
        sums = results.logs[rank].select("reduce_scatter").events
        if any(a.end is None or a.end > b.start for a, b in pairwise(sums)):
            text = f"rank {rank} issues a reduce-scatter while the one before is under way"
            fail(text, cause="too-many-under-way", rank=rank)
        for where, got, want in zip(places, found, forward + back, strict=True):
            if got != want:
                fail(
                    f"when the {where} of {DEPTH} computes, rank {rank} has {got[0]} all-gathers "
                    f"and {got[1]} reduce-scatters under way and has issued {got[2]} all-gathers, "
                    f"expected {want[0]}, {want[1]} and {want[2]}",
                    cause="not-beside-compute",
                    rank=rank,
                )
        what = "messages under way when backward() returns"
        expect_equal(left, 0, what=what, rank=rank, cause="left-over")


@exercise("3.32", "virtual", asserts="refused refusals silent group")
def test_wrong_calls_are_refused(impl, run, seed):
    """Overlapping or foreign units, tied across units, several devices, nothing to train."""

    def body(ctx):
        groups = [dist.new_group([0]), dist.new_group([1])]
        other = groups[1 - ctx.rank]

        def tied():
            inner = net(seed)
            inner.blocks[0].second.bias = inner.blocks[1].second.bias
            return inner

        def split():
            inner = net(seed)
            inner.head.to("meta")
            return inner

        made = [net(seed) for _ in range(6)]
        calls = [
            (made[0], [made[0].blocks[0], made[0].blocks[0]], None),
            (made[1], [made[1].blocks, made[1].blocks[1]], None),
            (made[2], [made[2]], None),
            (made[3], [nn.Linear(1, 1)], None),
            (made[4].requires_grad_(False), [], None),
            (made[5], [], other),
        ]
        both, apart = tied(), split()
        calls += [(both, both.units(), None), (apart, apart.units(), None)]
        with ctx.region("calls"):
            out = [refusal(impl.PerParameterFSDP, m, units, group=g) for m, units, g in calls]
            impl.PerParameterFSDP(net(seed))  # a right call sends nothing either
        return out

    words = ["a unit twice", "a unit inside another", "the module itself", "a foreign module"]
    words += ["nothing to train", "a group that this rank is not in"]
    words += ["a parameter tied across units", "two devices"]
    results = run(body, 2)
    for rank, refusals in enumerate(results):
        expect_refusals(refusals, words, rank=rank)
        if results.logs[rank].select(region="calls").events:
            fail(f"rank {rank} communicated while it wrapped", cause="late-check", rank=rank)


@exercise("3.32", "virtual", asserts="fixed refusals")
def test_cast_after_wrapping_is_refused(impl, run, seed):
    """A model that is cast after wrapping: forward raises ValueError on every rank."""

    def body(ctx):
        inner = net(seed)
        model = impl.PerParameterFSDP(inner, inner.units())
        inner.head.to(torch.float32)
        return [refusal(model, torch.zeros(1, 3, dtype=torch.float64))]

    expect_refused(run(body, 2), ["a layer that was cast after wrapping"])


@exercise("3.32", "nccl", asserts="host")
def test_sharding_does_not_wait_for_the_gpu(impl, run, seed):
    """In forward and backward the host never waits for its GPU."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.PerParameterFSDP(inner, inner.units())
        data = batch(seed, ctx.rank, device=ctx.device)
        with ctx.region("step"):
            loss_of(model, data).backward()

    expect_few_waits(run(body, 2), 0, "forward and backward")


@trace("3.32", measures="hidden")
def trace_per_parameter(impl):
    """Two steps of a small GPT, a unit for each block."""
    return traced(lambda *args: impl.PerParameterFSDP(*args))
