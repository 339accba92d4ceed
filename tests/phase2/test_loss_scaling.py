"""Checks of exercise 2.6: the loss scale, found by overflow, the same on all ranks."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refusals, fail, refusal

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
    """Fail at the first scale that differs, and say what went before it."""
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
@exercise("2.6", "virtual")
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


@exercise("2.6", "virtual")
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
        return scales(scaler, pattern), scales(top, [False] * 3), float(impl.LossScaler().scale)

    got, top, default = run(body, 1)[0]
    expect_scales(got, [float(s) for _, s in table], pattern, "hysteresis 2, minimum 2")
    expect_equal(
        top,
        [2.0**127] * 3,
        what="growing from 2^126, where float32 ends at 2^128",
        cause="beyond-float32",
    )
    expect_equal(default, 2.0**16, what="the scale to begin with", cause="default")


@exercise("2.6", "virtual gloo cuda")
def test_overflow_on_one_rank_is_everybodys(impl, run, seed, cases):
    """One rank's infinite gradient: all ranks learn it by one small message, scales stay equal."""
    for world_size, culprit in cases((3, 1), (2, 1), (4, 3), (1, 0)):

        def body(ctx, culprit=culprit):
            scaler = impl.LossScaler(scale=8.0, growth_interval=2)
            found = []
            for value in (1.0, math.nan, 1.0, -math.inf, 1.0, 1.0):
                own = value if ctx.rank == culprit else 1.0
                parameters = [weight(own, ctx.device), weight(1.0, ctx.device)]
                if ctx.rank != culprit and ctx.rank == 0:  # this rank's shard has no gradient
                    for p in parameters:
                        p.grad = None
                with ctx.region("unscale"):
                    finite = scaler.unscale(parameters)
                scaler.update()
                found.append([bool(finite), float(scaler.scale)])
            return found

        results = run(body, world_size)
        want = [[True, 8.0], [False, 4.0], [True, 4.0], [False, 2.0], [True, 2.0], [True, 4.0]]
        what = f"{world_size} ranks, rank {culprit} overflows: finite and scale, step by step"
        agree = all(got == results[0] for got in results)
        for rank, got in enumerate(results):
            decided = [g[0] for g in got] == [w[0] for w in want]
            alone = "scales-differ" if decided else "decided-alone"
            expect_equal(
                got, want, what=what, rank=rank, cause="overflow-missed" if agree else alone
            )
        for log in results.logs:
            log = log.select(region="unscale")
            log.all_waited()
            log.sent_at_most(6 * 16, "a single number per step")
            if log.messages > 6:
                fail(
                    f"rank {log.rank} issued {log.messages} messages in 6 steps, one each is "
                    "enough",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@exercise("2.6", "virtual")
def test_gradients_are_unscaled_once(impl, run, seed):
    """Each gradient is divided once, also one listed twice; a second call is refused."""

    def body(ctx):
        scaler = impl.LossScaler(scale=3.0)
        generator = torch.Generator().manual_seed(seed)
        parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 0, 7, 2)]
        for p in parameters[:3]:
            p.grad = torch.randn(p.shape, generator=generator)
        held = [p.grad for p in parameters]
        before = [p.grad.clone() for p in parameters[:3]]
        scaler.unscale(iter([*parameters, parameters[0]]))
        after = [p.grad.clone() for p in parameters[:3]]
        second = refusal(scaler.unscale, parameters)
        scaler.update()
        refused = [second, refusal(scaler.update)]
        kept = [p.grad is g for p, g in zip(parameters, held, strict=True)]
        return before, after, refused, kept, [p.grad for p in parameters[:3]]

    before, after, refused, kept, later = run(body, 1)[0]
    for got, value in zip(after, before, strict=True):
        expect_close(got, value / 3.0, what="gradients scaled by 3, after unscale", before=value)
    calls = [("a second unscale of one step", ()), ("an update without unscale", ())]
    expect_refusals(refused, calls)
    twice = not all(map(torch.equal, later, after))
    expect_equal(
        [all(kept), twice],
        [True, False],
        what="in place, and untouched by a refused call",
        cause="divided-again",
    )


@exercise("2.6", "virtual")
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
            state = json.loads(json.dumps(first.state_dict()))
            second = impl.LossScaler(**settings)
            second.load_state_dict(state)
            resumed.append([*head, *scales(second, pattern[stop:])])
        return whole, resumed

    whole, resumed = run(body, 1)[0]
    for stop, got in enumerate(resumed, 1):
        if got != whole:
            k = next(k for k in range(len(whole)) if got[k] != whole[k])
            fail(
                f"saved after step {stop}: at step {k + 1} the resumed run has scale {got[k]:g}, "
                f"the uninterrupted one {whole[k]:g}; what else does the next scale depend on?",
                cause="state-lost",
            )


@exercise("2.6", "virtual")
def test_bad_settings_are_refused(impl, run):
    """ValueError with the number in it."""
    bad = [
        ("growth_factor", 1.0),
        ("backoff_factor", 1.5),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("hysteresis", 0),
        ("minimum", -2.0),
        ("scale", 0.25),
        ("scale", math.inf),
    ]

    def body(ctx):
        said = []
        for name, value in bad:
            try:
                impl.LossScaler(**{name: value})
                said.append("accepted")
            except ValueError as error:
                said.append(f"refused: {error}")
        return said

    (said,) = run(body, 1)
    for (name, value), text in zip(bad, said, strict=True):
        got = text
        if text.startswith("refused: "):
            message = text.removeprefix("refused: ")
            got = "" if str(value) in message else f"{message} lacks {value}"
        expect_equal(got, "", what=f"{name}={value}", cause="accepted")
