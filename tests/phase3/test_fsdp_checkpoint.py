"""Checks of exercise 3.20: full state, deferred initialisation."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from tests.phase3.fsdp_models import DEPTH, ROOT, UNIT, WHOLE, Net, Stack, net, values_of
from tests.phase3.fsdp_states import Odds, compare, expect_state, odds, steps, wrapped


# -- full -----------------------------------------------------------------------------------------
@exercise("3.20", "virtual gloo", asserts="full elsewhere-empty tied-names")
def test_full_state_is_the_plain_modules(impl, run, seed):
    """After training, rank 0 has a state that a plain module loads strictly;
    other ranks have nothing."""

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


PLACED = ((8, 3), (2, 0, 1, 4), (1,))  # elements of the parameters of a vector


@exercise("3.20", "virtual", asserts="parts group layout")
def test_parts_are_overlaps(impl, run):
    """Which elements of which parameter a rank has, in vectors of several shapes, in groups."""

    def body(ctx):
        groups = [dist.new_group([3, 1, 4]), dist.new_group([0, 2])]
        found = []
        for numels in PLACED:
            module = nn.Module()
            every = {nn.Parameter(torch.ones(n)): [(module, "w", f"w{n}")] for n in numels}
            make = impl.solution(3, "fsdp").FlatParameter
            flat = make(every, groups[ctx.rank in (0, 2)], ctx.device)
            found.append(
                [
                    [list(names), list(shape), first, *where.indices(flat.shard.numel())[:2]]
                    for names, shape, first, where in impl.parts_of(flat)
                ]
            )
        return found

    for rank, found in enumerate(run(body, 5)):
        ranks = (0, 2) if rank in (0, 2) else (1, 3, 4)
        for numels, got in zip(PLACED, found, strict=True):
            chunk = -(-sum(numels) // len(ranks))
            start = ranks.index(rank) * chunk
            want, begin = [], 0
            for n in numels:
                low, high = max(begin, start), min(begin + n, start + chunk)
                if low < high:
                    want.append([[f"w{n}"], [n], low - begin, low - start, high - start])
                begin += n
            empty = [part[0] for part in got if part[1] == [0]]
            what = f"{numels} elements on ranks {ranks}: parts of a parameter without elements"
            expect_equal(empty, [["w0"]] * (0 in numels), what=what, rank=rank, cause="parts")
            lengths = [part[4] - part[3] for part in got if part[1] == [0]]
            if any(length > 0 for length in lengths):
                text = f"{numels} elements on ranks {ranks}: the slice of a parameter without "
                text += f"elements has {lengths[0]} on rank {rank}, expected none"
                fail(text, cause="parts", rank=rank)
            got = [part for part in got if part[1] != [0]]
            what = f"parts of {numels} elements on ranks {ranks}: names, shape, first, from, to"
            expect_equal(got, want, what=what, rank=rank, cause="parts")


@exercise(
    "3.20",
    "virtual",
    asserts="full elsewhere-empty copies-of-state shards-dtype tied-names converted same-shards "
    "left-as-is group dtype layout parameters life resources",
)
def test_full_state_of_odd_parameters(impl, run, seed):
    """In a group: tied, frozen, transposed, empty, 0-d, four dtypes; saved, loaded, saved again."""
    other = {
        name: value.float() if value.dtype == torch.float64 else value
        for name, value in odds(seed + 3).state_dict().items()
    }

    def body(ctx):
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        inner = odds(seed + ctx.rank % 2)
        options = {} if ctx.rank % 2 else {"flat_type": rounding(impl)}
        wrapper = impl.module("fsdp").FSDP
        model = wrapper(inner, inner.units(), group=groups[ctx.rank % 2 == 0], **options)
        with torch.no_grad():
            for shard in model.parameters():
                shard.add_(shard)
        random = torch.get_rng_state()
        grads = []
        for shard in (s for s in model.parameters() if s.requires_grad):
            shard.grad = torch.ones_like(shard)
            grads.append((shard, shard.grad))
        state = {name: value.clone() for name, value in reversed(other.items())}
        first = impl.full_state_dict(model)
        saved = {name: value.clone() for name, value in first.items()}
        for value in first.values():
            value.zero_()  # copies: neither the model nor another entry may change
        again = impl.full_state_dict(model)
        shards = list(model.parameters())
        known = [(id(s), s.data_ptr()) for s in shards]
        as_is = [model.training, all(s.grad is g and bool((g == 1).all()) for s, g in grads)]
        impl.load_full_state_dict(model, state)
        same = known == [(id(s), s.data_ptr()) for s in model.parameters()]
        loaded = impl.full_state_dict(model)
        inner.one.count.add_(1)
        copied = torch.equal(state["one.count"], other["one.count"])
        as_is.append(torch.equal(random, torch.get_rng_state()))
        return saved, again, loaded, same, as_is, copied

    for rank, (saved, again, loaded, same, as_is, copied) in enumerate(run(body, 4)):
        if rank > 1:
            for state in (saved, again, loaded):
                what = "entries of a rank that is not the group's first"
                expect_equal(state, {}, what=what, rank=rank, cause="on-every-rank")
        plain = odds(seed + rank % 2).state_dict()
        buffers = ("count", "mean")
        want = {n: v if n.endswith(buffers) else v + v for n, v in plain.items()}
        converted = {name: value.to(plain[name].dtype) for name, value in other.items()}
        if rank < 2:
            expect_state(saved, want, "full state", rank)
            what = "full state after the first was changed"
            expect_state(again, want, what, rank, cause="not-a-copy")
            expect_state(loaded, converted, "full state of what was loaded", rank)
        what = "shards are the same tensors after loading"
        expect_equal(same, True, what=what, rank=rank, cause="other-shards")
        what = "after full_state_dict: training mode, gradients and random state are as before"
        expect_equal(as_is, [True] * 3, what=what, rank=rank, cause="changed")
        what = "buffers are copies of what was loaded"
        expect_equal(copied, True, what=what, rank=rank, cause="not-a-copy")


def rounding(impl):
    """Flat parameters whose full vector is bfloat16, while the shards keep their dtypes."""
    return impl.solution(3, "fsdp_precision").MixedPrecisionFlat


@exercise("3.20", "virtual", asserts="one-at-a-time cost resources")
def test_full_state_costs_others_one_unit_at_most(impl, run, seed):
    """Only rank 0 collects: other ranks never hold more than their shards and one padded copy."""

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
                f"rank {rank} needs {more:,} B for the full state, expected at most {limit:,} B. "
                "Only rank 0 needs the others' parts, one unit after the other",
                cause="too-much-memory",
                rank=rank,
            )


@exercise("3.20", "virtual gloo", asserts="loaded load-silent own-elements")
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


@exercise("3.20", "virtual", asserts="state-refused refusals")
def test_state_that_does_not_fit_is_refused(impl, run, seed):
    """Missing, unknown and misshapen entries: ValueError, and nothing has changed."""

    def body(ctx):
        model, inner, _ = wrapped(impl, seed)
        good = net(seed + 1).state_dict()
        renamed = {f"module.{name}": value for name, value in good.items()}
        out = [refusal(impl.load_full_state_dict, model, renamed)]
        for name in ("head.weight", "offset", "blocks.2.second.weight"):
            short = {n: value for n, value in good.items() if n != name}
            out.append(refusal(impl.load_full_state_dict, model, short))
        for name, value in good.items():
            turned = value.shape[::-1] if value.shape[::-1] != value.shape else (*value.shape, 1)
            misshapen = good | {name: torch.zeros(turned, dtype=value.dtype)}
            out.append(refusal(impl.load_full_state_dict, model, misshapen))
        out.append(refusal(impl.load_full_state_dict, model, good | {"more": good["offset"]}))
        silent = len(ctx.ledger.events)
        return out, silent, values_of(model, inner), inner.offset.clone()

    alone = net(seed)
    want = values_of(alone, alone)
    calls = [
        "other names",
        *(f"a state without {n}" for n in ("a weight", "a buffer", "a tied name")),
        *(f"{n} of another shape" for n in net(seed).state_dict()),
        "an unknown name",
    ]
    for rank, (refusals, silent, after, offset) in enumerate(run(body, 2)):
        expect_refusals(refusals, calls, rank=rank)
        expect_equal(silent, 0, what="messages of refusals", rank=rank, cause="communicated")
        changed = [name for name in want if not torch.equal(after[name], want[name])]
        changed += [] if torch.equal(offset, torch.ones(2)) else ["offset"]
        what = "parameters and buffers that changed though the state was refused"
        expect_equal(changed, [], what=what, rank=rank, cause="half-loaded")


# -- deferred initialisation ----------------------------------------------------------------------
FILLED = ("weight", "bias", "shift", "turned", "offset")


def fill(part: nn.Module) -> None:
    """Values that depend on name and shape alone."""
    for name in (n for n in FILLED if getattr(part, n, None) is not None):
        value = getattr(part, name)
        value.copy_(torch.arange(value.numel()).view(value.shape) * 0.01 + len(name))


@exercise(
    "3.20",
    "virtual",
    asserts="initialised initialise-once no-autograd other-buffers-stay initialise-silent",
)
def test_deferred_initialisation(impl, run, seed):
    """A module from meta gets the values of a plain one that was initialised the same way."""

    def body(ctx):
        with torch.device("meta"):
            inner = Net().double()
        inner.register_buffer("table", torch.arange(3.0))  # computed, so never on meta
        inner.register_buffer("nothing", None)
        units = inner.units() if ctx.world_size == 3 else []
        model = impl.module("fsdp").FSDP(inner, units, device=ctx.device)
        calls: list[str] = []
        nothing: list[str] = []  # attributes that are None
        named = {part: name for name, part in inner.named_modules()}
        seen: list[bool] = []

        def initialise(part: nn.Module) -> None:
            calls.append(named[part])
            seen.append(torch.is_grad_enabled())
            every = (n for n in FILLED if getattr(part, n, 0) is None)
            nothing.extend(f"{named[part]}.{n}" for n in every)
            fill(part)

        with ctx.region("initialise"):
            impl.materialise(model, initialise)
        buffers = inner.offset.clone(), inner.table.clone()
        left = [n for n, p in named.items() if p is inner.head and p.weight is not None]
        if not torch.is_grad_enabled():
            left.append("autograd is off")
        return values_of(model, inner), buffers, calls, any(seen), left, sorted(nothing)

    plain = Net().double()
    with torch.no_grad():
        for part in plain.modules():
            fill(part)
    want = values_of(plain, plain)
    parts = sorted(
        name
        for name, part in plain.named_modules()
        if [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    )
    for world_size in (3, 1):
        results = run(body, world_size)
        for rank, (got, (offset, table), calls, autograd, left, nothing) in enumerate(results):
            what = "attributes that are None while their submodule is initialised"
            none = [f"blocks.{k}.frozen.bias" for k in range(3)] + ["head.bias"]
            expect_equal(nothing, none, what=what, rank=rank, cause="missing")
            what = "submodules that are initialised, those with buffers only among them"
            expect_equal(sorted(calls), parts, what=what, rank=rank, cause="calls")
            what = "the order of submodules, against that of rank 0"
            expect_equal(calls, results[0][2], what=what, rank=rank, cause="order")
            compare(got, want, f"initialised by {world_size} ranks", rank)
            expect_close(offset, plain.offset, what="the buffer", rank=rank)
            what = "a buffer that was not on meta"
            expect_equal(table.tolist(), [0.0, 1.0, 2.0], what=what, rank=rank, cause="buffers")
            expect_equal(autograd, False, what="autograd in it", rank=rank, cause="autograd")
            expect_equal(left, [], what="left afterwards", rank=rank, cause="left-over")
        for log in results.logs:
            if log.select(region="initialise").events:
                fail("initialising sent messages", cause="communicated")


@exercise("3.20", "virtual", asserts="same-draws randomness dtype layout parameters")
def test_deferred_draws_are_the_same_everywhere(impl, run, seed):
    """Random values, four dtypes: ranks that are seeded equally make one model, however many."""

    def body(ctx):
        with torch.device("meta"):
            inner = Odds()
        options = {} if ctx.world_size == 1 else {"flat_type": rounding(impl)}
        wrapper = impl.module("fsdp").FSDP
        model = wrapper(inner, inner.units(), device=ctx.device, **options)

        def draw(part: nn.Module) -> None:
            for name in ("turned", "scalar", "empty", "wide", "coarse"):
                getattr(part, name).uniform_()
            part.numbers.copy_(torch.tensor([2**53 + 1, 2**60 + 3, -1]))
            part.count.fill_(2**53 + 1)
            part.mean.uniform_()
            part.scratch.fill_(3)

        torch.manual_seed(seed)
        impl.materialise(model, draw)
        state = impl.full_state_dict(model)
        return state, [part.scratch.sum().item() for part in (inner.one, inner.root)]

    sizes = (1, 3)
    alone, shared = run.worlds(body, sizes)
    state = alone[0][0]
    for name, like in odds(seed).state_dict().items():
        value = state.get(name)
        if not isinstance(value, torch.Tensor) or value.dtype != like.dtype:
            fail(f"{name} on one rank: {value}, expected {like.dtype}", cause="dtype")
        if value.is_floating_point() and not ((value >= 0) & (value <= 1)).all():
            fail(
                f"{name} on one rank differs from the numbers that were drawn: {value}",
                cause="wrong",
            )
        if name.endswith(("numbers", "count")) and int(value.flatten()[0]) != 2**53 + 1:
            fail(f"{name} on one rank: {value}, expected 2^53 + 1 first", cause="wrong")
    expect_state(shared[0][0], state, "3 ranks against one")
    for rank, (_, scratch) in enumerate(shared):
        what = "buffers that are not saved"
        expect_equal(scratch, [12.0, 12.0], what=what, rank=rank, cause="buffers")


@exercise("3.20", "virtual", asserts="unit-by-unit cost resources")
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
