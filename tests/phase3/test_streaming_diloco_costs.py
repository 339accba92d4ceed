"""Checks of exercise 3.34: 4 bits per number, bytes, what waits when, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.hardware.clusters import Link, load_cluster
from tests.phase3.streams import BLOCK, Plan, Stack, coarse

SLOW = Link(alpha=1e-3, bandwidth=1e6)  # 8 Mb/s


def packed_bytes(numbers: int) -> int:
    """Of so many numbers in e3m0."""
    return 17 * -(-numbers // BLOCK)


def numbers(seed: int, count: int) -> torch.Tensor:
    """Float32 of very different sizes, some of them zero, and no two blocks alike."""
    made = torch.Generator().manual_seed(seed * 31 + count)
    sizes = 2.0 ** torch.randint(-9, 3, (count,), generator=made)
    blocks = 2.0 ** (torch.arange(count) // BLOCK * 9 - 20)
    x = torch.randn(count, generator=made) * sizes * blocks
    return x * (torch.rand(count, generator=made) > 0.1)


@exercise("3.34", "virtual cuda", asserts="e3m0 packed kept dtype layout")
def test_numbers_of_four_bits(impl, run, seed):
    """Each number becomes the nearest of its block's levels, in 17 bytes for 32 numbers."""
    borders = torch.tensor([1.45, 0.0086, -0.72, 0.36])  # a logarithm rounds at √2·2^k instead
    ties = torch.tensor([1.5, 0.75, -0.375, 2**-6 * 1.5, -(2**-7), 2**-7 * 0.999, 1.0, 0.0, 48.0])
    lengths = 0, 1, 31, 32, 33, 100
    given = [borders, ties[:7], ties, ties[:8] * 2.0**-60, *(numbers(seed, n) for n in lengths)]
    given += [torch.tensor([3.4e38, 1e38, -1e36]), torch.tensor([1e-39, -1.2e-38, 2.0**-132])]
    given += [torch.tensor([1e-39, -2e-40]), torch.tensor([1.0, 0.75 - 1e-12], dtype=torch.float64)]
    given += [numbers(seed, 64).double()[::2], numbers(seed, 40).bfloat16()]

    def body(ctx):
        found = []
        for x in given:
            mine = copy.deepcopy(x).to(ctx.device)  # with the strides of x
            packed = impl.pack_e3m0(mine)
            back = impl.unpack_e3m0(packed, len(x))
            kept = torch.equal(mine.cpu(), x)
            found.append([packed.numel() * packed.itemsize, str(packed.dtype), kept, back.cpu()])
        return found

    [found] = run(body, 1)
    for x, (nbytes, dtype, kept, back) in zip(given, found, strict=True):
        what = f"{len(x)} numbers in {x.dtype}"
        expect_equal(kept, True, what=f"{what}: x is as before pack_e3m0", cause="changed")
        facts = [nbytes, dtype, str(back.dtype)]
        want = [packed_bytes(len(x)), "torch.uint8", "torch.float32"]
        expect_equal(facts, want, what=f"{what}: bytes, dtype, dtype unpacked", cause="packed")
        expect_close(back, coarse(x.float()), what=f"{what}, packed and unpacked", rtol=0, atol=0)


@exercise("3.34", "virtual cuda", asserts="spoiled")
def test_what_is_not_finite_spoils_its_block_alone(impl, run, seed):
    """A number that is not finite makes the 32 of its block not finite, and no others."""
    places = (0, "nan"), (40, "inf"), (95, "-inf")

    def body(ctx):
        found = []
        for place, value in places:
            x = numbers(seed, 100).to(ctx.device)
            x[place] = float(value)
            found.append(impl.unpack_e3m0(impl.pack_e3m0(x), 100).cpu())
        return found

    [found] = run(body, 1)
    for (place, value), back in zip(places, found, strict=True):
        block = torch.arange(100) // BLOCK == place // BLOCK
        what = f"{value} at place {place} of 100: what is finite"
        expect_equal(back.isfinite().tolist(), (~block).tolist(), what=what, cause="spoiled")


class Fragments(nn.Module):
    """Equal layers of 1,056 numbers, one for each fragment, and a frozen one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(BLOCK, BLOCK) for _ in range(count))
        self.frozen = nn.Linear(50, 50).requires_grad_(False)

    def drift(self, rank: int) -> None:
        """An inner step."""
        with torch.no_grad():
            for p in self.layers.parameters():
                p.add_(0.01 * (rank + 1))


NUMBERS = BLOCK * BLOCK + BLOCK


@exercise("3.34", "virtual gloo", asserts="turns bytes in-flight finish cost")
def test_one_message_per_turn(impl, run):
    """A turn sends its fragment in one message, which nobody waits for before it is received."""
    plans = [
        Plan(ranks=3, segments=(9,), fragments=2, every=4, delay=2, mix=0.5, bits=bits)
        for bits in (4, 32)
    ]

    def body(ctx):
        flying = []
        for plan in plans:
            model = Fragments(plan.fragments).double()  # and yet 4 bytes, or 4 bits, per number
            parts = [[*layer.parameters()] for layer in model.layers]
            rounds = impl.StreamingDiLoCo(model, parts, **plan.settings)
            begun = len(ctx.ledger.events)
            for step in range(1, plan.segments[0] + 1):
                model.drift(ctx.rank)
                with ctx.region(f"{plan.bits} {step}"):
                    rounds.step()
                flying.append(sum(e.end is None for e in ctx.ledger.events[begun:]))
            with ctx.region(f"{plan.bits} finish"):
                rounds.finish()
            with ctx.region(f"{plan.bits} again"):
                rounds.finish()
        return flying

    results = run(body, 3)
    for log, flying in zip(results.logs, results, strict=True):
        log.all_waited()
        for plan in plans:
            check_messages(log, plan)
            steps = range(1, plan.segments[0] + 1)
            sent = [sum(len(plan.sends(t)) for t in range(1, step + 1)) for step in steps]
            come = [sum(len(plan.receives(t)) for t in range(1, step + 1)) for step in steps]
            want = [a - b for a, b in zip(sent, come, strict=True)]
            got, flying = flying[: len(want)], flying[len(want) :]
            what = f"{plan.bits} bits: messages under way after each step, sent and not waited for"
            expect_equal(got, want, what=what, rank=log.rank, cause="no-overlap")


def check_messages(log, plan) -> None:
    """Messages and bytes of each step and of ``finish()``."""
    each = (plan.ranks - 1) * packed_bytes(NUMBERS)
    formula = "(W-1)·17⌈n/32⌉"
    if plan.bits == 32:
        each, formula = 2 * (plan.ranks - 1) * 4 * NUMBERS // plan.ranks, "2(W-1)/W·4n"
    turns = {str(step): len(plan.sends(step)) for step in range(1, plan.segments[0] + 1)}
    late = plan.fragments - turns[str(plan.segments[0])]
    for region, count in (turns | {"finish": late, "again": 0}).items():
        part = log.select(region=f"{plan.bits} {region}")
        where = f"in step {region}" if region.isdigit() else f"in finish(), {region}"
        if part.messages != count:
            cause = "too-many-messages" if part.messages > count else "wrong-turn"
            said = f"{plan}: {part.messages} messages {where}, expected {count}"
            fail(said, cause=cause, rank=log.rank)
        if region == "finish" and part.events[1].start > (part.events[0].end or 0.0):
            said = f"{plan}: finish() waits for one fragment before it sends the next one"
            fail(said, cause="no-overlap", rank=log.rank)
        part.sent_at_most(count * each + 16, f"{formula} per turn")
        part.sent_at_least(count * each - 16, f"{formula} per turn")


@exercise("3.34", "virtual", asserts="in-flight overlap")
def test_steps_hide_the_message(impl, run):
    """On a slow link the message travels beside τ steps: step() takes no virtual time."""
    cluster = dataclasses.replace(load_cluster("ethernet-v100"), gpus_per_node=1, between=SLOW)
    wire = SLOW.alpha + packed_bytes(NUMBERS) / SLOW.bandwidth
    steps = 8

    def body(ctx, delay):
        model = Fragments(2)
        parts = [[*layer.parameters()] for layer in model.layers]
        rounds = impl.StreamingDiLoCo(model, parts, every=4, delay=delay, bits=4)
        waited = 0.0
        for _ in range(steps):
            model.drift(ctx.rank)
            time.sleep(0.6 * wire)
            begin = time.monotonic()
            rounds.step()
            waited += time.monotonic() - begin
        rounds.finish()
        return waited

    for delay, exposed in ((2, 0.0), (1, 3 * 0.4 * wire), (0, 4 * wire)):
        for rank, waited in enumerate(run.simulate(body, 2, delay, cluster=cluster)):
            if abs(waited - exposed) > 0.1 * wire:
                fail(
                    f"τ = {delay}, a step takes 0.6 of a message's time: step() waited "
                    f"{waited / wire:.2f} such times in {steps} steps, expected "
                    f"{exposed / wire:.2f}",
                    cause="no-overlap",
                    rank=rank,
                )


@exercise("3.34", "nccl", asserts="host")
def test_no_step_waits_for_the_gpu(impl, run):
    """Packing, sending, receiving and mixing: the host never waits for its GPU."""

    def body(ctx):
        for bits in (4, 32):
            model = Fragments(2).to(ctx.device)
            parts = [[*layer.parameters()] for layer in model.layers]
            rounds = impl.StreamingDiLoCo(model, parts, every=2, delay=1, bits=bits)
            for region in ("first", "step", "step", "step"):
                model.drift(ctx.rank)
                with ctx.region(region):
                    rounds.step()
            rounds.finish()

    expect_few_waits(run(body, 2), 0, "three steps that send and receive")


@exercise("3.34", "virtual", asserts="strided refused refusals parameters")
def test_units_are_dealt_out(impl, run, seed):
    """Unit i goes to fragment i mod F; tied parameters once, frozen ones never."""

    def body(ctx):
        model = Stack(seed)
        names = {p: name for name, p in model.named_parameters()}
        dealt = [
            [[names[p] for p in part] for part in impl.strided(list(model.units), count)]
            for count in (1, 2, 3)
        ]
        refused = [refusal(impl.strided, list(model.units), count) for count in (0, -1, 6)]
        return [dealt, refused, [len(part) for part in impl.strided(list(model.units), 5)]]

    results = run(body, 1)
    first, third = ["units.0.weight", "units.0.bias"], ["units.2.bias"]
    scale, head = ["units.3.factors"], ["units.4.weight", "units.4.bias"]
    want = [
        [[*first, *third, *scale, *head]],
        [[*first, *third, *head], scale],
        [[*first, *scale], head, third],
    ]
    expect_equal(results[0][0], want, what="the parameters of 1, 2, 3 fragments", cause="dealt")
    expect_equal(results[0][2], [2, 0, 1, 1, 2], what="parameters of 5 fragments", cause="dealt")
    expect_refusals(results[0][1], [f"{count} fragments of 5 units" for count in (0, -1, 6)])


@exercise("3.34", "virtual", asserts="refused refusals")
def test_bad_settings_are_refused(impl, run, seed):
    """ValueError on every rank, before anything is sent."""
    nan = float("nan")
    wrong = [
        {"every": 0, "delay": 0},
        {"every": 1, "delay": 0},
        {"delay": 4},
        {"delay": -1},
        {"mix": 1.0},
        {"mix": -0.1},
        {"mix": nan},
        {"lr": 0.0},
        {"lr": nan},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"bits": 8},
    ]

    def cut(model: Stack) -> dict[str, list]:
        a, b = model.parts(2)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        return {
            "a parameter in two fragments": [a, [*b, a[0]]],
            "a parameter twice, another one missing": [a, [*b[:-1], a[0]]],
            "a parameter missing": [a[:-1], b],
            "no fragment": [],
            "a frozen parameter": [a, [*b, *frozen]],
            "a parameter of another model": [a, [*b[:-1], nn.Parameter(torch.ones(5))]],
            "an empty fragment": [a, b, []],
        }

    def body(ctx):
        said = []
        for more in wrong:
            model = Stack(seed)
            settings = {"every": 4, **more}
            said.append(refusal(impl.StreamingDiLoCo, model, model.parts(2), **settings))
        model = Stack(seed)
        made = impl.StreamingDiLoCo
        return [*said, *(refusal(made, model, cuts, every=4) for cuts in cut(model).values())]

    expect_refused(run(body, 2), [*map(str, wrong), *cut(Stack(seed))])


@trace("3.34", measures="waiting")
def trace_streams(impl):
    """Eight steps: two fragments in turn, with 4 bits per number."""

    def body(ctx):
        model = Fragments(2)
        parts = [[*layer.parameters()] for layer in model.layers]
        rounds = impl.StreamingDiLoCo(model, parts, every=4, delay=1)
        for _ in ctx.steps(9):  # the first one warms up and is not drawn
            model.layers[1](model.layers[0](torch.ones(64, BLOCK))).sum().backward()
            model.drift(ctx.rank)
            rounds.step()
        rounds.finish()

    return body
