"""Checks of exercise 3.34: fragments in turn, mixed late, step by step against a simulation."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_equal, fail
from tests.phase3.bad_input import check_models_that_differ, check_non_members
from tests.phase3.rounds import OUTER, Net, batches, gradient_step
from tests.phase3.rounds import sgd as momentum
from tests.phase3.rounds import simulated as diloco
from tests.phase3.streams import (
    Plan,
    Stack,
    compare,
    inner_step,
    sgd,
    simulated,
    values_of,
)


def trained(ctx, impl, seed, plan, group=None, number=None) -> list:
    """A rank's run: what the calls return, its parameters after each, and the outer state."""
    number = ctx.rank if number is None else number
    model = Stack(seed + number, plan.dtype).to(ctx.device)
    optimizer, held = sgd([*model.parameters()]), list(model.parameters())
    parts = model.parts(plan.fragments)
    rounds = impl.StreamingDiLoCo(model, parts, group=group, **plan.settings)
    model.seen += number  # what a layer with statistics would do
    data = iter(batches(seed, number, sum(plan.segments)))
    flags, found = [], []
    for steps in plan.segments:
        for _ in range(steps):
            inner_step(model, optimizer, [t.to(ctx.device) for t in next(data)])
            flags.append(bool(rounds.step()))
            found.append(values_of(model))
        flags.append(bool(rounds.finish()))
        found.append(values_of(model))
    same = all(a is b for a, b in zip(held, model.parameters(), strict=True))
    pairs = zip((*rounds.common, *rounds.velocity), [*parts, *parts], strict=True)
    beside = [[(t.shape, t.dtype) for t in a] == [(p.shape, p.dtype) for p in b] for a, b in pairs]
    state = [t for own in (*rounds.common, *rounds.velocity) for t in own]
    history = any(t.requires_grad for t in state)
    own = torch.equal(model.seen.cpu(), Stack(seed, plan.dtype).seen + number)
    return [flags, found, [same, all(beside), own, history], [t.cpu() for t in state]]


def judge(results, seed, plan, ranks=None) -> None:
    """Values first, then what the calls return, then what is equal on all ranks."""
    wanted = simulated(seed, plan)
    flags = [
        flag
        for steps in plan.segments
        for flag in [*(bool(plan.receives(n + 1)) for n in range(steps)), steps > 0]
    ]
    for number, (_, found, _, _) in enumerate(results):
        rank = ranks[number] if ranks else number
        compare(found, wanted[number], seed=seed, plan=plan, rank=rank)
    first = results[0]
    own = sum(p.nbytes for part in Stack(seed, plan.dtype).parts(plan.fragments) for p in part)
    for number, (got_flags, found, facts, state) in enumerate(results):
        rank = ranks[number] if ranks else number
        what = f"{plan}: what step() and finish() return"
        expect_equal(got_flags, flags, what=what, rank=rank, cause="flags")
        what = f"{plan}: parameters are the same objects; θ and v have their shapes and dtypes; "
        what += "the buffer is rank 0's first and then the rank's own; θ and v have a history"
        expect_equal(facts, [True, True, True, False], what=what, rank=rank, cause="state")
        held = sum(t.nbytes for t in state)
        expect_equal(held, 2 * own, what=f"{plan}: bytes of θ and v", rank=rank, cause="state")
        if any(not torch.equal(a, b) for a, b in zip(state, first[3], strict=True)):
            said = f"{plan}: θ or v differs in its bits between two ranks"
            fail(said, cause="ranks-differ", rank=rank)
        if any(not torch.equal(t, first[1][-1][name]) for name, t in found[-1].items()):
            said = f"{plan}: after finish() a parameter differs in its bits between two ranks"
            fail(said, cause="ranks-differ", rank=rank)


def plan(ranks, segments, fragments, every, delay, mix, **more) -> Plan:
    """A plan in one line."""
    return Plan(
        ranks=ranks,
        segments=segments,
        fragments=fragments,
        every=every,
        delay=delay,
        mix=mix,
        **more,
    )


@exercise(
    "3.34",
    "virtual gloo cuda",
    asserts="turns outer mixed start in-place state finish again own parameters dtype layout life "
    "alone",
)
def test_fragments_take_turns(impl, run, seed, cases):
    """Fragments are sent in turn, received τ steps later and mixed, also after finish()."""
    for chosen in cases(
        plan(3, (8, 5), 2, 4, 1, 0.5),
        plan(2, (7, 0, 3), 3, 4, 3, 0.25),
        plan(2, (6,), 2, 3, 0, 0.5, outer={"lr": 1.0, "momentum": 0.0}),
        plan(1, (5,), 3, 3, 2, 0.75),
        plan(4, (3,), 1, 5, 2, 0.5),
    ):
        judge(run(lambda ctx, p=chosen: trained(ctx, impl, seed, p), chosen.ranks), seed, chosen)


@exercise(
    "3.34",
    "virtual gloo cuda",
    nccl=True,
    asserts="coarse outer state same-bits finish dtype resources",
)
def test_four_bits_travel(impl, run, seed, cases):
    """With 4 bits the mean is over all ranks' rounded differences; θ and v have the same bits."""
    wide = {"bits": 4, "dtype": torch.float64}
    for chosen in cases(
        plan(3, (7, 2), 2, 3, 1, 0.5, **wide),
        plan(2, (6,), 1, 2, 1, 0.0, **wide),
        plan(1, (4,), 3, 3, 0, 0.5, **wide),
    ):
        judge(run(lambda ctx, p=chosen: trained(ctx, impl, seed, p), chosen.ranks), seed, chosen)


@exercise("3.34", "virtual", asserts="same-bits coarse")
def test_all_ranks_add_up_in_one_order(impl, run):
    """1, -1 and 2^-26 have another sum in float32 in each order: θ is the same on all ranks."""
    differences = 1.0, -1.0, 2.0**-26

    def body(ctx):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        settings = {"every": 1, "delay": 0, "mix": 0.0, "lr": 1.0, "momentum": 0.0, "bits": 4}
        rounds = impl.StreamingDiLoCo(model, [[model.weight]], **settings)
        nn.init.constant_(model.weight, -differences[ctx.rank])
        rounds.step()
        return rounds.common[0][0].detach().clone()

    first, *others = run(body, 3)
    for rank, common in enumerate(others, 1):
        if not torch.equal(common, first):
            fail(
                f"θ is {common[0, 0]:.3g} on rank {rank} and {first[0, 0]:.3g} on rank 0, for "
                "differences of 1, -1 and 2^-26: a sum in float32 depends on its order, so all "
                "ranks need the same one",
                cause="ranks-differ",
                rank=rank,
            )


@exercise("3.34", "virtual", asserts="is-diloco")
def test_one_fragment_is_diloco(impl, run, seed):
    """One fragment, τ = 0, α = 0, 32 bits: the rounds of exercise 3.25."""

    def body(ctx):
        model = Net(seed + ctx.rank)
        own = [p for p in model.parameters() if p.requires_grad]
        optimizer = momentum(model, momentum=0.9)
        settings = {"every": 3, "delay": 0, "mix": 0.0, "bits": 32, **OUTER}
        rounds = impl.StreamingDiLoCo(model, [own], **settings)
        for batch in batches(seed, ctx.rank, 8):
            gradient_step(model, optimizer, batch)
            rounds.step()
        rounds.finish()
        return values_of(model)

    wanted = diloco(seed, 2, 8, 3, OUTER)[-1]
    for rank, got in enumerate(run(body, 2)):
        for name, value in got.items():
            near = torch.allclose(value.double(), wanted[name].double(), rtol=1e-4, atol=1e-5)
            expect_equal(near, True, what=f"{name} is DiLoCo's", rank=rank, cause="not-diloco")


@exercise("3.34", "virtual gloo", asserts="group")
def test_a_group_keeps_to_itself(impl, run, seed):
    """Two groups of two ranks of four, in another order than the world's; each trains a model."""
    for bits in (4, 32):
        check_groups(impl, run, seed, plan(2, (5,), 2, 2, 1, 0.5, bits=bits, dtype=torch.float64))


def check_groups(impl, run, seed, chosen) -> None:
    """What each group of two trains, and that no message is for all four ranks."""
    groups = [3, 1], [0, 2]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        k = 1 - ctx.rank % 2
        number = dist.get_rank(made[k])
        with ctx.region("rounds"):
            return [number, *trained(ctx, impl, seed + 100 * k, chosen, made[k], number)]

    results = run(body, 4)
    for log in results.logs:
        for event in log.select(region="rounds").events:
            if len(event.group) > 2:
                said = f"{event} is for all 4 ranks, not for the group of 2 that was given"
                fail(said, cause="wrong-group", rank=log.rank, line=event.line)
    for k, members in enumerate(groups):
        ordered = sorted(members, key=lambda rank: results[rank][0])
        judge([results[rank][1:] for rank in ordered], seed + 100 * k, chosen, ordered)


@exercise("3.34", "virtual", asserts="start refused refusals")
def test_who_is_no_member_is_refused(impl, run, seed):
    """A rank outside of the group gets a ValueError, and sends nothing."""

    def made(group):
        model = Stack(seed)
        return impl.StreamingDiLoCo(model, model.parts(2), every=2, group=group)

    check_non_members(run, {"StreamingDiLoCo": made})


@exercise("3.34", "virtual", asserts="start refused refusals")
def test_models_that_differ_are_refused(impl, run):
    """One rank has another model: a ValueError on every rank, before any parameter is sent."""
    check_models_that_differ(
        run, lambda model: impl.StreamingDiLoCo(model, [[*model.parameters()]], every=2)
    )
