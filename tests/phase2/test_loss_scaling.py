"""Checks of exercise 2.6: the loss scale, found by overflow, the same on all ranks."""

from __future__ import annotations

import json
import math
import random
from typing import Any

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
)
from tests.phase2.windows import plain

NOWHERE = 1e-30  # a minimum that is never reached


def weight(value: float, device: Any = "cpu") -> nn.Parameter:
    """A parameter of two elements whose gradient is 1 and ``value``."""
    p = nn.Parameter(torch.zeros(2, device=device))
    p.grad = torch.tensor([1.0, value], device=device)
    return p


def overflows(seed: int, steps: int) -> list[bool]:
    """Some overflows, some of them in a row, and quiet runs of every length up to 6."""
    pattern = [True, False, True, True, False, False, False, True, *[False] * 6]
    chance = random.Random(seed)
    return pattern + [chance.random() < 0.2 for _ in range(steps)]


def scales(scaler: Any, pattern: list[bool]) -> list[float]:
    """The scale after each step; bad gradients are infinite or NaN in turn."""
    found = []
    bad = [math.inf, math.nan, -math.inf]
    for k, overflow in enumerate(pattern):
        scaler.unscale([weight(bad[k % 3] if overflow else 1.0)])
        scaler.update()
        found.append(float(scaler.scale))
    return found


def torch_scales(pattern: list[bool], start: float, **settings: Any) -> list[float]:
    """The same by torch's GradScaler."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=start, **settings), []
    for overflow in pattern:
        p = weight(math.inf if overflow else 1.0)
        optimizer = torch.optim.SGD([p], lr=0.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def expect_scales(got: list[float], want: list[float], pattern: list[bool], what: str) -> None:
    """Fail at the first scale that differs, and name the steps before it."""
    for k, (ours, right) in enumerate(zip(got, want, strict=True)):
        if abs(ours - right) <= 1e-5 * right:
            continue
        before = want[k - 1] if k else None
        if pattern[k]:
            cause = "backoff"
        else:
            cause = "growth-missing" if ours < right else "growth-too-early"
        steps = "".join("x" if o else "." for o in pattern[: k + 1])
        fail(
            f"{what}: after the steps {steps} (x: overflow) the scale must be {right:g}, it is "
            f"{ours:g} (it was {before})",
            cause=cause,
        )


# -- 2.6 ------------------------------------------------------------------------------------------
@exercise("2.6", "virtual", asserts="backoff growth")
def test_scale_follows_overflows_and_quiet_steps(impl, run, seed):
    """Growth and backoff at the same steps as torch's GradScaler."""
    pattern = overflows(seed, 30)
    for interval, growth, backoff in ((3, 2.0, 0.5), (1, 1.5, 0.25)):
        settings = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}

        def body(ctx, settings=settings):
            return scales(impl.LossScaler(scale=1024.0, minimum=NOWHERE, **settings), pattern)

        (got,) = run(body, 1)
        want = torch_scales(pattern, 1024.0, **settings)
        expect_scales(got, want, pattern, f"growth interval {interval}")


@exercise("2.6", "virtual", asserts="backoff growth float32-end life")
def test_hysteresis_and_limits(impl, run):
    """With hysteresis 2 a single overflow lowers nothing; the scale stays within its limits."""
    table = [
        ("x", 16),
        ("x", 8),
        ("x", 4),
        (".", 4),
        ("x", 4),
        (".", 4),
        ("x", 4),
        (".", 4),
        (".", 4),
        (".", 8),
        ("x", 8),
        ("x", 4),
        ("x", 2),
        ("x", 2),
        (".", 2),
    ]
    pattern = [step == "x" for step, _ in table]

    def body(ctx):
        scaler = impl.LossScaler(scale=16.0, hysteresis=2, growth_interval=3, minimum=2.0)
        top = impl.LossScaler(scale=2.0**126, growth_interval=1)
        high = impl.LossScaler(scale=2.0**126, growth_interval=1, growth_factor=1.5)
        tops = scales(top, [False] * 3), [s / 2.0**126 for s in scales(high, [False] * 4)]
        return scales(scaler, pattern), tops, float(impl.LossScaler().scale)

    got, (top, high), default = run(body, 1)[0]
    expect_scales(got, [float(s) for _, s in table], pattern, "hysteresis 2, minimum 2")
    expect_equal(
        top,
        [2.0**127] * 3,
        what="growing from 2^126, where float32 ends at 2^128",
        cause="beyond-float32",
    )
    what = "growing by 1.5 from 2^126, in units of 2^126: float32 ends at 4"
    expect_equal(high, [1.5, 2.25, 3.375, 3.375], what=what, cause="beyond-float32")
    expect_equal(default, 2.0**16, what="the scale to begin with", cause="default")


OVERFLOWING = (1.0, math.nan, 1.0, -math.inf, 1.0, 1.0)
DECIDED = [[True, 8.0], [False, 4.0], [True, 4.0], [False, 2.0], [True, 2.0], [True, 4.0]]


def decisions(ctx: Any, impl: Any, values: tuple[float, ...], group: Any = None) -> list:
    """The results of ``unscale`` and the scale, step by step; rank 0 has no
    gradients if all is 1."""
    scaler = impl.LossScaler(scale=8.0, growth_interval=2)
    found = []
    for step, value in enumerate(values):
        parameters = [weight(value, ctx.device), weight(1.0, ctx.device)]
        parameters = parameters[::-1] if step % 2 else parameters
        if step % 4 > 1:  # 16 bits
            for p in parameters:
                p.data, p.grad = p.data.half(), p.grad.half()
        if ctx.rank == 0 and set(values) == {1.0}:  # this rank's shard has no gradient
            for p in parameters:
                p.grad = None
        with ctx.region("unscale"):
            finite = scaler.unscale(parameters, *([group] if group else []))
        with ctx.region("update"):
            scaler.update()
        found.append([plain(finite), plain(scaler.scale)])
    return found


def expect_decisions(got: list, want: list, everybody: list, what: str, rank: int) -> None:
    for finite, scale in got:
        if not isinstance(finite, bool) or not isinstance(scale, float):
            message = f"{what}: expected a bool and a float, got {finite!r} and {scale!r}"
            fail(message, cause="type", rank=rank)
    decided = [g[0] for g in got] == [w[0] for w in want]
    alone = "scales-differ" if decided else "decided-alone"
    agree = all(other == got for other in everybody)
    expect_equal(got, want, what=what, rank=rank, cause="overflow-missed" if agree else alone)


@exercise(
    "2.6",
    "virtual gloo cuda",
    asserts="finite-everywhere shards one-number same-scale alone cost",
)
def test_overflow_on_one_rank_is_everybodys(impl, run, seed, cases):
    """One rank's infinite gradient: all ranks learn of it by one small message,
    and scales stay equal."""
    for world_size, culprit in cases((3, 1), (2, 1), (4, 3), (1, 0)):

        def body(ctx, culprit=culprit):
            return decisions(ctx, impl, OVERFLOWING if ctx.rank == culprit else (1.0,) * 6)

        results = run(body, world_size)
        what = f"{world_size} ranks, rank {culprit} overflows: finite and scale, step by step"
        for rank, got in enumerate(results):
            expect_decisions(got, DECIDED, list(results), what, rank)
        for log in results.logs:
            expect_equal(
                len(log.select(region="update").events), 0, what="messages of update", cause="cost"
            )
            log = log.select(region="unscale")
            log.all_waited()
            log.sent_at_most(6 * 16, "a single number per step")
            if len(log.events) > 6:
                fail(
                    f"rank {log.rank} issued {len(log.events)} messages in 6 steps, one each is "
                    "enough",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@exercise("2.6", "virtual", asserts="group shards alone")
def test_a_group_decides_by_itself(impl, run):
    """Ranks 1 and 3 overflow at other steps than ranks 0 and 2, which have fewer of them."""

    def body(ctx):
        ours, theirs = dist.new_group([3, 1]), dist.new_group([0, 2])
        if ctx.rank in (0, 2):
            return decisions(ctx, impl, (math.inf,) * 3 if ctx.rank else (1.0,) * 3, theirs)
        if ctx.rank == 1:
            return decisions(ctx, impl, (1.0,) * 6, ours)
        return decisions(ctx, impl, OVERFLOWING, ours)

    results = run(body, 4)
    others = [[False, 8.0 / 2**k] for k in (1, 2, 3)]
    for members, want in (((1, 3), DECIDED), ((0, 2), others)):
        for rank in members:
            what = f"the group of ranks {members}: finite and scale, step by step"
            expect_decisions(results[rank], want, [results[r] for r in members], what, rank)


def scaled_gradients(seed: int, device: Any = "cpu") -> list[torch.Tensor]:
    """Of several dtypes and layouts, empty and 0-d, and some that only float64 can hold."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(n, generator=generator) for n in (5, 0, 7, 12, 1, 6)]
    drawn += [torch.full((4,), 3e38), torch.full((4,), -6e4).half()]  # the sum is no such number
    drawn[2] = drawn[2].double() * 1e200
    drawn[3] = drawn[3].view(3, 4).t()
    drawn[4] = drawn[4].view(())
    drawn[5] = drawn[5].half()
    return [t.to(device) for t in drawn]


@exercise(
    "2.6",
    "virtual",
    asserts="divided in-place own-dtype listed-twice refused-twice no-parameters dtype layout "
    "parameters life refusals",
)
def test_gradients_are_unscaled_once(impl, run, seed):
    """Each gradient is divided once, also a gradient listed twice; a second call is refused."""

    def body(ctx):
        scaler = impl.LossScaler(scale=3.0, growth_interval=2)
        held = scaled_gradients(seed)
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in held]
        for p, gradient in zip(parameters, held, strict=True):
            p.grad = gradient
        missing = nn.Parameter(torch.zeros(2))
        listed = [] if ctx.rank == 1 else [missing, *parameters, parameters[0]]
        early = refusal(scaler.update)
        finite = plain(scaler.unscale(iter(listed)))
        after = [g.clone() for g in held]
        with ctx.region("again"):
            refused = [early, refusal(scaler.unscale, parameters)]
        scaler.update()
        refused.append(refusal(scaler.update))
        kept = missing.grad is None
        kept &= all(p.grad is g for p, g in zip(parameters, held, strict=True))
        scale = plain(scaler.scale)
        return after, refused, kept, held, finite, [scale, *scales(scaler, [False])]

    results = run(body, 2)
    for rank, (after, refused, kept, later, finite, scale) in enumerate(results):
        for got, value in zip(after, scaled_gradients(seed), strict=True):
            want = value if rank == 1 else (value.double() / 3.0).to(value.dtype)
            what = f"gradients scaled by 3, after unscale {'without parameters' * rank}"
            slack = 1e-3 if value.dtype == torch.float16 else 1e-6
            size = float(value.abs().max()) if value.numel() else 0.0
            before = None if rank == 1 else value
            expect_close(got, want, what=what, before=before, rtol=slack, atol=slack * size)
        calls = ["an update before unscale", "a second unscale of one step", "a second update"]
        expect_refusals(refused, calls, rank=rank)
        untouched = all(map(torch.equal, later, after))
        expect_equal(
            [kept, untouched],
            [True, True],
            what="in place, and untouched by a refused call",
            cause="divided-again",
        )
        expect_equal(finite, True, what="all are finite", rank=rank, cause="overflow-missed")
        what = "the scale after it, and after another quiet step, of an interval of 2"
        expect_equal(scale, [3.0, 6.0], what=what, rank=rank, cause="growth-missing")
    sent = [len(log.select(region="again").events) for log in results.logs]
    expect_equal(sent, [0, 0], what="messages of a refused unscale", cause="late-check")


@exercise("2.6", "virtual", asserts="state life")
def test_state_is_saved_and_restored(impl, run, seed):
    """Interrupted anywhere, written as JSON and resumed: the scales of the whole run."""
    pattern = overflows(seed, 0)
    settings = {"growth_interval": 3, "hysteresis": 2, "minimum": NOWHERE}

    def body(ctx):
        whole = scales(impl.LossScaler(scale=64.0, **settings), pattern)
        resumed = []
        for stop in range(1, len(pattern)):
            first = impl.LossScaler(scale=64.0, **settings)
            head = scales(first, pattern[:stop])
            saved = first.state_dict()
            scales(first, [False, True, True])  # goes on: what was saved does not
            state = json.loads(json.dumps(saved))
            second, beside = impl.LossScaler(**settings), impl.LossScaler(**settings)
            scales(second, [False] * 2)
            for scaler in (beside, second):
                scaler.load_state_dict(state)
            scales(beside, [False, True, True])
            resumed.append([*head, *scales(second, pattern[stop:])])
        return whole, resumed

    whole, resumed = run(body, 1)[0]
    for stop, got in enumerate(resumed, 1):
        if got != whole:
            k = next(k for k in range(len(whole)) if got[k] != whole[k])
            fail(
                f"saved after step {stop}: at step {k + 1} the resumed run has scale {got[k]:g}, "
                f"the uninterrupted one {whole[k]:g}. What else does the next scale depend on?",
                cause="state-lost",
            )


@exercise("2.6", "virtual", asserts="own-settings life")
def test_a_state_goes_on_with_other_settings(impl, run):
    """Five quiet steps, loaded where three are enough: the next scale grows;
    other ranks go their way."""

    def body(ctx):
        first = impl.LossScaler(scale=64.0, growth_interval=9)
        scales(first, [False] * 5)
        second = impl.LossScaler(growth_interval=3, growth_factor=4.0, backoff_factor=0.125)
        beside = impl.LossScaler(scale=32.0, growth_interval=2)
        scales(beside, [False])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        went = scales(second, [False, False, False, False, True])
        return went, scales(first, [False] * 4), scales(beside, [False])

    second, first, beside = run(body, 1)[0]
    cause = "settings"
    what = "5 quiet steps loaded into an interval of 3, then 4 quiet steps and an overflow: scales"
    expect_equal(second, [256.0, 256.0, 256.0, 1024.0, 128.0], what=what, cause=cause)
    what = "the scaler that was saved goes on"
    expect_equal(first, [64.0, 64.0, 64.0, 128.0], what=what, cause=cause)
    expect_equal(beside, [64.0], what="a third scaler's scale", cause=cause)


@exercise("2.6", "virtual", asserts="settings refusals")
def test_bad_settings_are_refused(impl, run):
    """Settings that could not work are refused, and the extreme ones that can work are accepted."""
    nan = math.nan
    bad = [
        *({"growth_factor": v} for v in (1.0, 0.5, nan)),
        *({"backoff_factor": v} for v in (1.0, 1.5, 0.0, -0.5, nan)),
        *({"growth_interval": v} for v in (0, -1)),
        *({"hysteresis": v} for v in (0, -1)),
        *({"minimum": v} for v in (0.0, -2.0, nan, 2.0**17)),
        *({"scale": v} for v in (0.25, -1.0, nan, math.inf)),
    ]
    good = [
        {"growth_interval": 1, "hysteresis": 1},
        {"minimum": 2.0**16, "growth_factor": 1.001, "backoff_factor": 0.999},
        {"minimum": 1e-30, "scale": 1e-30},
    ]

    def body(ctx):
        said = [refusal(impl.LossScaler, **settings) for settings in bad]
        return said, [refusal(impl.LossScaler, **settings) for settings in good]

    said, taken = run(body, 1)[0]
    expect_refusals(said, [str(settings) for settings in bad])
    for settings, text in zip(good, taken, strict=True):
        expect_equal(text, "!it was accepted", what=f"{settings}", cause="refused")


@exercise("2.6", "nccl", asserts="host")
def test_unscaling_waits_once_for_the_gpu(impl, run, seed):
    """However many gradients there are, the host waits for its GPU once, for all ranks' number."""

    def body(ctx):
        parameters = [nn.Parameter(torch.ones(n, device=ctx.device)) for n in (3, 1, 4)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        scaler = impl.LossScaler(scale=4.0)
        with ctx.region("step"):
            scaler.unscale(parameters)

    expect_few_waits(run(body, 2), 1, "unscale")
