"""Checks of exercise 3.20: full state, deferred initialisation."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.fsdp_models import DEPTH, ROOT, UNIT, WHOLE, Net, Stack, net, values_of
from tests.phase3.fsdp_states import compare, refused, steps, wrapped


# -- full -----------------------------------------------------------------------------------------
@exercise("3.20", "virtual gloo")
def test_full_state_is_the_plain_modules(impl, run, seed):
    """After training, rank 0 has what a plain module loads strictly; the others have nothing."""

    def body(ctx):
        model, inner, optimizer = wrapped(impl, seed, offset=2.0)
        steps(model, optimizer, seed, ctx.rank, range(2))
        return impl.full_state_dict(model), values_of(model, inner)

    results = run(body, 3)
    state, values = results[0]
    plain = net(seed).state_dict()
    expect_equal(sorted(state), sorted(plain), what="names in the full state", cause="names")
    for name, value in plain.items():
        expect_equal(state[name].shape, value.shape, what=f"shape of {name}", cause="shape")
    for name, value in values.items():
        what = f"full state: {name}"
        expect_close(state[name], value, what=what, before=plain[name], rtol=0, atol=0)
    expect_equal(state["offset"].tolist(), [2.0, 2.0], what="the buffer", cause="buffers")
    expect_equal([len(r[0]) for r in results], [len(plain), 0, 0], what="entries per rank")


@exercise("3.20", "virtual")
def test_full_state_costs_others_one_unit_at_most(impl, run, seed):
    """Only rank 0 collects: others never hold more than their shards and one padded copy."""

    def body(ctx):
        with PeakMemory() as memory:
            inner = Stack()
            model = impl.module("fsdp").FSDP(inner, list(inner.layers))
            before = memory.current
            memory.peak = 0
            with ctx.region("state"):
                impl.full_state_dict(model)
        return memory.peak - before

    results = run(body, 4)
    for rank, (more, log) in enumerate(zip(results, results.logs, strict=True)):
        log.select(region="state").sent_at_most(WHOLE / 4 + 4 * 9 * 4, "P/W: every rank its shards")
        limit = WHOLE + 3 * UNIT if rank == 0 else UNIT
        if more > limit:
            fail(
                f"rank {rank} needs {more:,} B for the full state, expected at most {limit:,} B: "
                "only rank 0 needs the others' parts, one unit after the other",
                cause="too-much-memory",
                rank=rank,
            )


@exercise("3.20", "virtual gloo")
def test_full_state_is_loaded_by_any_number_of_ranks(impl, run, seed):
    """Every rank cuts its part of a plain state dict; nothing is sent."""
    plain = net(seed + 1)
    plain.offset.fill_(3.0)
    state = plain.state_dict()

    def body(ctx):
        model, inner, _ = wrapped(impl, seed)
        with ctx.region("load"):
            impl.load_full_state_dict(model, state)
        return values_of(model, inner), inner.offset.clone()

    sizes = (3, 2, 1, 5)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for rank, (got, offset) in enumerate(results):
            what = f"loaded by {world_size} ranks"
            compare(got, {name: state[name] for name in got}, what, rank)
            expect_equal(offset.tolist(), [3.0, 3.0], what="the buffer", cause="buffers")
        for log in results.logs:
            if log.select(region="load").events:
                fail("loading sent messages: every rank has the whole state", cause="communicated")


@exercise("3.20", "virtual")
def test_state_that_does_not_fit_is_refused(impl, run, seed):
    """Missing, unknown and misshapen entries: ValueError, and nothing has changed."""

    def body(ctx):
        model, inner, _ = wrapped(impl, seed)
        before = values_of(model, inner)
        good = net(seed + 1).state_dict()
        renamed = {f"module.{name}": value for name, value in good.items()}
        short = {name: value for name, value in good.items() if name != "head.weight"}
        misshapen = good | {"head.weight": torch.zeros(1, 10)}
        bad = [renamed, short, misshapen, good | {"more": good["offset"]}]
        out = [refused(lambda s=s: impl.load_full_state_dict(model, s)) for s in bad]
        return out, before, values_of(model, inner)

    for rank, (got, before, after) in enumerate(run(body, 2)):
        same = all(torch.equal(after[name], before[name]) for name in before)
        what = "ValueError for other names, a missing, a misshapen and an unknown one"
        expect_equal(got, [True] * 4, what=what, rank=rank, cause="accepted")
        expect_equal(same, True, what="parameters unchanged", rank=rank, cause="half-loaded")


# -- deferred initialisation ----------------------------------------------------------------------
def fill(part: nn.Module) -> None:
    """Values that depend on name and shape alone."""
    names = [n for n in ("weight", "bias", "shift", "offset") if getattr(part, n, None) is not None]
    for name in names:
        value = getattr(part, name)
        value.copy_(torch.arange(value.numel()).view(value.shape) * 0.01 + len(name))


@exercise("3.20", "virtual")
def test_deferred_initialisation(impl, run, seed):
    """A module from meta gets the values of a plain one that was initialised the same way."""

    def body(ctx):
        with torch.device("meta"):
            inner = Net().double()
        inner.register_buffer("table", torch.arange(3.0))  # computed, so never on meta
        inner.register_buffer("nothing", None)
        model = impl.module("fsdp").FSDP(inner, inner.units(), device=ctx.device)
        calls: list[int] = []

        def initialise(part: nn.Module) -> None:
            calls.append(id(part))
            fill(part)

        with ctx.region("initialise"):
            impl.materialise(model, initialise)
        buffers = inner.offset.clone(), inner.table.clone()
        return values_of(model, inner), buffers, len(calls) - len(set(calls))

    plain = Net().double()
    with torch.no_grad():
        for part in plain.modules():
            fill(part)
    want = values_of(plain, plain)
    for world_size in (3, 1):
        results = run(body, world_size)
        for rank, (got, (offset, table), twice) in enumerate(results):
            compare(got, want, f"initialised by {world_size} ranks", rank)
            expect_close(offset, plain.offset, what="the buffer", rank=rank)
            what = "a buffer that was not on meta"
            expect_equal(table.tolist(), [0.0, 1.0, 2.0], what=what, rank=rank, cause="buffers")
            expect_equal(twice, 0, what="submodules initialised twice", rank=rank)
        for log in results.logs:
            if log.select(region="initialise").events:
                fail("initialising sent messages", cause="communicated")


@exercise("3.20", "virtual")
def test_no_rank_ever_holds_the_model(impl, run, seed):
    """From meta to shards: the peak is the shards and one unit."""

    def body(ctx):
        with torch.device("meta"):
            inner = Stack()
        with PeakMemory() as memory:
            model = impl.module("fsdp").FSDP(inner, list(inner.layers), device=ctx.device)
            impl.materialise(model, lambda part: part.reset_parameters())
        return memory.peak, memory.current

    limit = WHOLE / 4 + UNIT + ROOT + 4000
    for rank, (peak, current) in enumerate(run(body, 4)):
        if peak > limit:
            fail(
                f"rank {rank} needs {peak:,} B to initialise, expected at most {limit:,.0f} B (all "
                f"{DEPTH} units: {WHOLE:,} B): one unit after the other",
                cause="too-much-memory",
                rank=rank,
            )
        if current > WHOLE / 4 + 1000:
            fail(f"rank {rank} keeps {current:,} B", cause="too-much-memory", rank=rank)


@trace("3.20")
def trace_checkpoint(impl):
    """Two steps, and a full state dict on rank 0."""

    def body(ctx):
        torch.manual_seed(0)
        inner = Stack(width=256)
        model = impl.module("fsdp").FSDP(inner, list(inner.layers))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in ctx.steps(2):
            model(torch.ones(32, 2)).sum().backward()
            optimizer.step()
        impl.full_state_dict(model)

    return body
