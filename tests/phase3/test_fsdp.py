"""Checks of exercise 3.15: nothing but shards between the units' own forward and backward."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, held_by
from tests.phase3.fsdp_memory import expect_within
from tests.phase3.fsdp_models import (
    DEPTH,
    FROZEN,
    ROOT,
    UNIT,
    WHOLE,
    Stack,
    batch,
    compare_training,
    loss_of,
    net,
    own_gradients,
    traced,
    train,
    use_of_freed_is_told,
    values_of,
)
from tests.phase3.fsdp_states import refused

SLACK = 8000  # bytes of activations of one sample, and of what is in hand


# -- values ---------------------------------------------------------------------------------------
@exercise("3.15", "virtual gloo cuda", asserts="training mean-added shards")
@use_of_freed_is_told()
def test_first_step_moves_by_the_mean_gradient(impl, run, seed, cases):
    """One step of SGD moves every full parameter by the mean of the ranks' gradients."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.FSDP(inner, inner.units())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = loss_of(model, batch(seed, ctx.rank, device=ctx.device))
        seen = {name: value.cpu() for name, value in inner.values().items()}
        loss.backward()
        optimizer.step()
        return seen, values_of(model, inner)

    plain, sizes = net(seed), cases(3, 5, 1, 2, 4)
    before, own = values_of(plain, plain), own_gradients(seed, range(max(sizes)))
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for rank, (seen, after) in enumerate(results):
            for name, value in before.items():
                what = f"{world_size} ranks: {name} in the first forward"
                expect_close(seen[name], value, what=what, rank=rank, rtol=0, atol=0)
            for name, value in before.items():
                same = name.replace("second.weight", "first.weight")
                zeros = torch.zeros_like(value)
                parts = [part.get(same, zeros) for part in own[:world_size]]
                expect_close(
                    value - after[name],
                    torch.stack(parts).mean(0),
                    what=f"{world_size} ranks: step of {name}",
                    rank=rank,
                    contributions=parts,
                    rtol=1e-9,
                    atol=1e-10,
                )


@exercise(
    "3.15",
    "virtual gloo cuda",
    asserts="training mean-added values clip-norm clip-in-place life modes",
)
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed, cases):
    """AdamW, clipping, accumulation, evaluation between the steps: as one process on all data."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.FSDP(inner, [] if ctx.world_size == 2 else inner.units())
        return train(ctx, model, inner, seed, impl.clip_by_global_norm)

    sizes = cases(3, 2, 5, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        compare_training(results, seed, f"{world_size} ranks, 3 steps")


@exercise("3.15", "virtual gloo", asserts="unused parameters")
@use_of_freed_is_told()
def test_unit_that_nobody_uses_stays(impl, run, seed):
    """Without gradient, weight decay must not move a unit; frozen parameters never move."""

    def body(ctx):
        inner = net(seed)
        model = impl.FSDP(inner, inner.units())
        before = values_of(model, inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(seed, ctx.rank, step)).backward()
            optimizer.step()
        after = values_of(model, inner)
        with torch.no_grad():
            inner.unused(torch.zeros(1, 3, dtype=torch.float64))
        return before, after, inner.unused.seen

    kept = net(seed).unused.weight.detach()
    for rank, (before, after, unused) in enumerate(run(body, 2)):
        same = torch.equal(unused, kept)
        changed = [n for n in after if FROZEN in n and not torch.equal(after[n], before[n])]
        if not same:
            text = f"a unit that no rank uses moved on rank {rank}: without a gradient, not with "
            fail(f"{text}one of zeros, weight decay leaves it alone", cause="moved", rank=rank)
        expect_equal(changed, [], what="frozen parameters that moved", rank=rank, cause="moved")


@exercise("3.15", "virtual", asserts="no-padding shards")
@use_of_freed_is_told()
def test_padding_is_nowhere(impl, run, seed):
    """All ranks together hold exactly the model's elements: parameters, gradients, state."""

    def body(ctx):
        inner = net(seed)
        model = impl.FSDP(inner, inner.units())
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, batch(seed, ctx.rank)).backward()
        optimizer.step()
        shards = list(model.parameters())
        moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        return [
            sum(s.numel() for s in shards),
            sum(s.grad.numel() for s in shards if s.grad is not None),
            moments,
        ]

    inner = net(seed)
    numel = sum(p.numel() for p in inner.parameters())
    used = sum(p.numel() for p in inner.parameters() if p.requires_grad)
    used -= sum(p.numel() for p in inner.unused.parameters())
    sizes = (1, 2, 3, 7)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        totals = [sum(column) for column in zip(*results, strict=True)]
        for total, want, name in zip(
            totals, (numel, used, used), ("parameters", "gradients", "first moments"), strict=True
        ):
            if total != want:
                fail(
                    f"{world_size} ranks hold {total} elements of {name}, the model has {want}: "
                    "padding belongs to messages only",
                    cause="padding" if total > want else "elements-lost",
                )


@exercise("3.15", "virtual", asserts="places-none")
@use_of_freed_is_told()
def test_freed_parameters_are_none(impl, run, seed):
    """Outside of forward and backward a module's attribute is None: its use is an error there."""

    def body(ctx):
        inner = net(seed)
        model = impl.FSDP(inner, inner.units())
        parts = {"blocks.0.first": inner.blocks[0].first, "head": inner.head}

        def left():
            weights = {f"{name}.weight": getattr(p, "weight", None) for name, p in parts.items()}
            return [name for name, value in weights.items() if value is not None]

        found = {"wrapping": left()}
        values_of(model, inner)
        found["an evaluation"] = left()
        loss = loss_of(model, batch(seed, ctx.rank))
        found["forward"] = left()
        loss.backward()
        found["backward"] = left()
        return found

    for rank, found in enumerate(run(body, 2)):
        for when, left in found.items():
            if left:
                fail(
                    f"after {when} {', '.join(left)} are tensors without memory, expected None",
                    cause="not-none",
                    rank=rank,
                )


# -- memory and bytes -----------------------------------------------------------------------------
def stack(seed: int) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack()


@exercise("3.15", "virtual gloo", asserts="memory shard resources")
@use_of_freed_is_told()
def test_state_is_one_part_of_w(impl, run, seed):
    """Parameters, gradients and Adam's moments take 16Ψ/W bytes on every rank."""

    def body(ctx):
        inner = stack(seed)
        model = impl.FSDP(inner, list(inner.layers))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        held = held_by(model, optimizer)
        return [held.parameters, held.gradients, held.optimizer]

    sizes = (4, 2)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        share = WHOLE / world_size + 4 * (DEPTH + 1)
        limits = (share, share, 2 * share + 4 * (2 * DEPTH + 4))
        for rank, held in enumerate(results):
            for kind, got, limit in zip(
                ("parameters", "gradients", "optimizer state"), held, limits, strict=True
            ):
                if got > limit:
                    fail(
                        f"rank {rank} of {world_size} holds {got:,} B of {kind}, its part is "
                        f"{limit:,.0f} B of {WHOLE:,} B of parameters. Not sharded evenly, or "
                        "a shard keeps a larger tensor alive",
                        cause="too-much-memory",
                        rank=rank,
                    )


@exercise(
    "3.15",
    "virtual",  # gloo's threads drop their buffers a moment after the wait
    asserts="one-unit freed freed-after-forward freed-after-backward resources",
)
@use_of_freed_is_told()
def test_full_parameters_live_for_one_unit(impl, run, seed):
    """Live bytes while each unit computes, after forward and after backward."""

    def body(ctx):
        points: dict[str, int] = {}

        def tell(point: str) -> None:
            points[point] = max(points.get(point, 0), memory.current)

        with PeakMemory() as memory:
            inner = stack(seed)
            model = impl.FSDP(inner, list(inner.layers))
            tell("after wrapping")
            for layer in inner.layers:
                layer.tell = tell
            for _ in range(2):
                model.zero_grad()
                loss = model(torch.ones(1, 2)).sum()
                tell("after forward")
                loss.backward()
                del loss
                tell("after backward")
            model.zero_grad()
            memory.peak = 0
            with torch.no_grad():
                model(torch.ones(1, 2))
            tell("after evaluation")
            points["peak of an evaluation"] = memory.peak
        return points

    world_size = 4
    shards = WHOLE / world_size + SLACK
    rest = 2 * shards  # with gradients
    limits = {
        "after wrapping": shards,
        "forward": shards + ROOT + UNIT,
        "after forward": shards,
        "backward": rest + 2 * ROOT + 3 * UNIT,
        "after backward": rest,
        "after evaluation": shards,
        "peak of an evaluation": shards + ROOT + UNIT,
    }
    expect_within(run(body, world_size), limits)


@exercise("3.15", "virtual gloo", asserts="cost gather-bytes reduce-bytes")
@use_of_freed_is_told()
def test_bytes_of_a_step(impl, run, seed):
    """Two all-gathers and one reduce-scatter: 3(W-1)/W·P per rank, frozen parameters less."""

    def body(ctx):
        inner = stack(seed)
        inner.layers[1].requires_grad_(False)
        model = impl.FSDP(inner, list(inner.layers))
        with ctx.region("step"):
            model(torch.ones(1, 2)).sum().backward()

    world_size = 3
    for log in run(body, world_size, delays=True).logs:
        log = log.select(region="step")
        log.all_waited()
        share = (world_size - 1) / world_size
        padding = 3 * 4 * (DEPTH + 1) * world_size
        formula = "3(W-1)/W·P, two all-gathers and a reduce-scatter; frozen parameters two"
        log.sent_at_most(share * (3 * WHOLE - UNIT) + padding, formula)
        log.sent_at_least(share * (2 * WHOLE - UNIT), "(W-1)/W·P per collective")
        if log.messages > 3 * (DEPTH + 1):
            fail(
                f"rank {log.rank} issued {log.messages} collectives in a step, at most three for "
                f"each of {DEPTH + 1} units are needed: join a unit's parameters",
                cause="too-many-messages",
                rank=log.rank,
            )


# -- groups and wrong calls ------------------------------------------------------------------------
@exercise("3.15", "virtual", asserts="group mean-added refused-outside refusals")
@use_of_freed_is_told()
def test_works_in_a_group(impl, run, seed):
    """Ranks 3 and 1 of 4 shard over their own group while 0 and 2 train something else."""

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        mine, other = groups if ctx.rank % 2 else groups[::-1]
        inner = net(seed + ctx.rank % 2)
        with ctx.region("outside"):
            outside = refusal(impl.FSDP, net(seed), group=other)
        model = impl.FSDP(inner, inner.units() if ctx.rank % 2 else [], group=mine)
        loss_of(model, batch(seed, ctx.rank)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return outside, values_of(model, inner)

    results = run(body, 4)
    for rank, (outside, after) in enumerate(results):
        what = "a group that this rank is not in"
        expect_refusals([outside], [what], rank=rank)
        if results.logs[rank].select(region="outside").events:
            fail(f"rank {rank} communicated before it refused {what}", cause="late-check")
        alone = net(seed + rank % 2)
        before = values_of(alone, alone)
        own = own_gradients(seed + rank % 2, (0, 2) if rank % 2 == 0 else (1, 3), data=seed)
        for name, value in before.items():
            same = name.replace("second.weight", "first.weight")
            parts = [part.get(same, torch.zeros_like(value)) for part in own]
            expect_close(
                value - after[name],
                torch.stack(parts).mean(0),
                what=f"a group of ranks {rank} and {(rank + 2) % 4}: step of {name}",
                rank=rank,
                contributions=parts,
                rtol=1e-9,
                atol=1e-10,
            )


@exercise("3.15", "virtual", asserts="refused-calls refusals tied-inside")
def test_wrong_calls_are_refused(impl, run, seed):
    """Overlapping or foreign units, tied across units, several devices, nothing to train."""

    def body(ctx):
        def tied():
            inner = net(seed)
            inner.head.weight = nn.Parameter(inner.head.weight.detach())
            inner.blocks[0].second.bias = inner.blocks[1].second.bias
            return inner

        def split():
            inner = net(seed)
            inner.head.to("meta")
            return inner

        calls = {
            "a unit twice": lambda i: (i, [i.blocks[0], i.blocks[0]]),
            "a unit inside another": lambda i: (i, [i.blocks, i.blocks[1]]),
            "a unit around another": lambda i: (i, [i.blocks[1], i.blocks]),
            "the module itself": lambda i: (i, [i]),
            "a foreign module": lambda i: (i, [nn.Linear(1, 1)]),
            "a parameter tied across units": lambda i: (tied(), None),
            "two devices": lambda i: (split(), None),
            "nothing to train": lambda i: (i.requires_grad_(False), None),
        }
        with ctx.region("wrong calls"):
            out = {}
            for name, make in calls.items():
                inner, units = make(net(seed))
                units = inner.units() if units is None else units
                out[name] = refused(lambda inner=inner, units=units: impl.FSDP(inner, units))
        return out

    results = run(body, 2)
    for rank, got in enumerate(results):
        for name, was in got.items():
            expect_equal(was, True, what=f"ValueError for {name}", rank=rank, cause="accepted")
    for log in results.logs:
        if log.events:
            fail("a wrong call communicated before it was refused", cause="communicated-first")


@trace("3.15", measures="hidden")
def trace_fsdp(impl):
    """Two steps of a small GPT, a unit for each block."""
    return traced(lambda *args: impl.FSDP(*args))


@exercise("3.15", "nccl", asserts="host")
def test_sharding_does_not_wait_for_the_gpu(impl, run, seed):
    """In forward and backward the host never waits for its GPU, and once for the norm."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.FSDP(inner, inner.units())
        data = batch(seed, ctx.rank, device=ctx.device)
        with ctx.region("step"):
            loss_of(model, data).backward()
        with ctx.region("clip"):
            impl.clip_by_global_norm(model, 1e-3)

    results = run(body, 2)
    expect_few_waits(results, 0, "forward and backward")
    expect_few_waits(results, 1, "clip_by_global_norm", "clip")
