"""Checks of exercise 2.6: the whole step with a loss scale."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
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
from distlab.reference.workloads import build_model, digits
from tests.phase2.half_precision import (
    BF16,
    CLASSES,
    FEATURES,
    FP16,
    RANKS,
    net,
    seeded,
    window_of,
)
from tests.phase2.windows import expect_numbers, plain


def frozen_net(seed: int, device: Any = "cpu") -> nn.Module:
    """The same behind a frozen layer, with a frozen bias at the end."""
    frozen = seeded(seed + 1, lambda: nn.Linear(FEATURES, FEATURES).requires_grad_(False))
    model = nn.Sequential(frozen, net(seed))
    model[1][-1].bias.requires_grad_(False)
    return model.to(device)


# -- 2.6 ------------------------------------------------------------------------------------------
@exercise(
    "2.6",
    "virtual cuda",
    asserts="scaled-loss cancels returned limit norm-true frozen cost parameters",
)
def test_scaled_step_equals_one_process(impl, run, seed, cases):
    """Scale, accumulate, reduce, unscale, clip, step: the scale cancels, the norm is true."""
    every = cases((3, FP16, 4096.0, 0.05), (2, BF16, 1.5, None), (4, FP16, 4096.0, 0.05))
    for world_size, dtype, scale, limit in every:
        check_scaled(run, impl, seed, RANKS[:world_size], dtype, scale, limit, [])


@exercise("2.6", "virtual", asserts="group together alone dtype")
def test_a_group_steps_while_another_skips(impl, run, seed):
    """Ranks 1 and 3 step by their own targets while ranks 0 and 2, whose inputs are huge, skip."""
    shapes = [RANKS[3], RANKS[0], RANKS[1], RANKS[1]]
    check_scaled(run, impl, seed, shapes, FP16, 4096.0, 0.05, [[3, 1], [0, 2]])


def check_scaled(
    run: Any,
    impl: Any,
    seed: int,
    shapes: list,
    dtype: Any,
    loss_scale: float,
    limit: float | None,
    groups: list,
) -> None:
    """One step of all ranks, or of the first group while the second one overflows."""

    def body(ctx):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = [g for g, ranks in zip(made, groups, strict=True) if ctx.rank in ranks]
        model = impl.module("mixed_precision").MixedPrecision(frozen_net(seed, ctx.device), dtype)
        for p in model.parameters():
            p.grad = torch.full_like(p, 3e4)
        every = list(model.parameters())
        parts = [{"params": every[::2]}, {"params": every[1::2]}]
        optimizer = torch.optim.SGD(parts, lr=1.0)
        window = window_of(seed, ctx.rank, shapes[ctx.rank], ctx.device)
        if groups and ctx.rank in groups[1]:
            window = [(x * 1e30, y) for x, y in window]
        scaler = impl.LossScaler(scale=loss_scale)
        given = {"group": mine[0]} if mine else {}
        with ctx.region("step"):
            answer = impl.scaled_step(model, optimizer, scaler, window, max_norm=limit, **given)
        weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
        probe, _ = window_of(seed, 0, [(4, 0)], ctx.device)[0]
        logits = model(probe)
        model.write_back()
        return weights, plain(answer), plain(scaler.scale), torch.equal(logits, model(probe))

    results = run(body, len(shapes))
    members = sorted(groups[0]) if groups else list(range(len(shapes)))
    start = frozen_net(seed)
    joined = [w for rank in members for w in window_of(seed, rank, shapes[rank])]
    with torch.autocast("cpu", dtype=dtype):
        logits = start(torch.cat([x for x, _ in joined]))
    mean = F.cross_entropy(logits.float(), torch.cat([y for _, y in joined]))
    mean.backward()
    trainable = [p for p in start.parameters() if p.requires_grad]
    norm = float(torch.cat([p.grad.flatten() for p in trainable]).norm())
    factor = 1.0 if limit is None else min(1.0, limit / norm)
    bound = 6 * torch.finfo(dtype).eps
    what = f"ranks {members}, {dtype}, loss scale {loss_scale:g}, clipped to {limit}"
    for rank in members:
        weights, answer, scale, follow = results[rank]
        loss, length, stepped = expect_numbers(answer, [float, float, bool], what, rank)
        expect_equal(stepped, True, what=f"{what}: stepped", rank=rank, cause="skipped")
        expect_equal(scale, loss_scale, what=f"{what}: the scale", rank=rank, cause="scale-moved")
        if not abs(length - norm) <= bound * norm:
            cause = "norm-scaled" if length > 0.9 * norm * loss_scale else "norm"
            message = f"{what}: the gradient's norm is {norm:g}, got {length:g}"
            fail(message, cause=cause, rank=rank)
        if not abs(loss - mean.item()) <= bound:
            message = f"{what}: the mean loss is {mean.item():g}, got {loss:g}"
            fail(message, cause="loss-value", rank=rank)
        for name, p in start.named_parameters():
            value = p.detach()
            if not p.requires_grad and not torch.equal(
                weights[name].float(), value.to(weights[name].dtype).float()
            ):
                message = f"{what}: the optimizer has moved {name}, which is frozen"
                fail(message + ": it steps what has a gradient", cause="frozen-moved", rank=rank)
            expect_close(
                weights[name].float(),
                value - factor * p.grad if p.requires_grad else value.to(dtype).float(),
                rank=rank,
                before=value if p.requires_grad else None,
                what=f"{what}: {name} after the step",
                rtol=0.0 if p.requires_grad else 4e-3,
                atol=bound * factor * norm + 1e-6,
            )
        expect_equal(follow, True, what=f"{what}: weights follow masters", cause="stale-weights")
    for rank in set(range(len(shapes))) - set(members):
        _, answer, scale, _ = results[rank]
        what = "ranks (0, 2), whose inputs are huge: stepped, and the scale"
        *_, stepped = expect_numbers(answer, [float, float, bool], what, rank)
        expect_equal([stepped, scale], [False, 2048.0], what=what, rank=rank, cause="not-skipped")
    for log in results.logs:
        log = log.select(region="step")
        log.all_waited()
        if len(log.events) > 4:
            fail(
                f"rank {log.rank} issued {len(log.events)} collectives, at most 4 are needed: "
                "gradients, targets, loss, overflow",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("2.6", "virtual cuda", asserts="scaled-loss dtype")
def test_small_gradients_survive(impl, run):
    """A gradient far below the smallest float16 arrives in the master."""
    samples = 256

    def small() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, CLASSES, bias=False))
        nn.init.eye_(model[0].weight)
        nn.init.constant_(model[1].weight, 1e-5)
        model[1].weight.data[0] = -1e-5
        return model

    def body(ctx):
        model = impl.module("mixed_precision").MixedPrecision(small().to(ctx.device), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(next(iter(model.parameters())).grad.cpu())
        )
        window = [
            (
                torch.ones(samples, 4, device=ctx.device),
                torch.zeros(samples, dtype=torch.int64, device=ctx.device),
            )
        ]
        impl.scaled_step(model, optimizer, impl.LossScaler(), window)
        return seen[0]

    (got,) = run(body, 1)
    reference = small()
    F.cross_entropy(
        reference(torch.ones(samples, 4)), torch.zeros(samples, dtype=torch.int64)
    ).backward()
    want = reference[0].weight.grad
    off = float((got - want).norm() / want.norm())
    if off > 0.05:
        fail(
            f"gradients of {float(want.abs().mean()):.1e}, made of terms below float16's smallest "
            f"number, are off by {off:.0%}: scale the loss before backward",
            cause="underflow",
        )


def with_changes(steps: list, states: list[torch.Tensor]) -> list[list]:
    """(stepped, unchanged, scale, finite norm) of every step, by the states around it."""
    around = zip(steps, pairwise(states), strict=True)
    return [[stepped, torch.equal(*pair), *more] for (stepped, *more), pair in around]


@exercise("2.6", "virtual gloo cuda", asserts="together update-ends norm-infinite alone life")
def test_overflow_changes_nothing_but_the_scale(impl, run, seed, cases):
    """Too large a scale, then one rank's huge inputs: all ranks skip, nothing else moves."""
    for world_size in cases(2, 3):

        def body(ctx):
            model = impl.module("mixed_precision").MixedPrecision(net(seed).to(ctx.device), FP16)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            scaler = impl.LossScaler(scale=2.0**25)
            window = window_of(seed, ctx.rank, [(8, 0), (3, 0)], ctx.device)
            huge = [(x * (1e5 if ctx.rank == 1 else 1), y) for x, y in window]
            steps = []

            def state():
                moments = [s["exp_avg"] for s in optimizer.state.values() if "exp_avg" in s]
                tensors = [*model.parameters(), *moments, model(window[0][0])]
                return torch.cat([t.detach().flatten() for t in tensors]).cpu()

            def step(window):
                answer = plain(impl.scaled_step(model, optimizer, scaler, window))
                known = isinstance(answer, tuple) and len(answer) == 3
                steps.append([known and bool(answer[2]), float(scaler.scale), answer])
                states.append(state())

            states = [state()]
            while not (steps and steps[-1][0]) and len(steps) < 25:
                step(window)
            tries = len(steps)
            step(huge)
            step(window)
            return steps, states, tries

        results = run(body, world_size)
        for rank, (steps, *_) in enumerate(results):
            for step in steps:
                answer = expect_numbers(step[2], [float, float, bool], "a step", rank)
                step[2] = math.isfinite(answer[1])
        everybody = [with_changes(steps, states) for steps, states, _ in results]
        for rank, (steps, (*_, tries)) in enumerate(zip(everybody, results, strict=True)):
            what = f"{world_size} ranks"
            expect_equal(
                steps,
                everybody[0],
                what=f"{what}: (stepped, unchanged, scale, finite "
                "norm) of every step, against rank 0's",
                rank=rank,
                cause="ranks-differ",
            )
            for number, (stepped, same, _, finite) in enumerate(steps, 1):
                if finite != stepped:
                    fail(
                        f"{what}: at step {number}, stepped={stepped}. A step that is skipped has "
                        "a norm that is not finite, one that is taken has a finite one",
                        cause="norm",
                        rank=rank,
                    )
                if same == stepped:
                    state = "did not change" if stepped else "changed"
                    fail(
                        f"{what}: at step {number}, stepped={stepped}, masters, Adam's state or "
                        f"logits {state}",
                        cause="moved" if same else "half-skipped",
                        rank=rank,
                    )
            if tries < 2 or not steps[tries - 1][0]:
                fail(
                    f"{what}: beginning with a scale of 2^25 some steps must be skipped, then one "
                    f"taken; {tries} were tried",
                    cause="scale-not-found",
                    rank=rank,
                )
            decisions = [s[0] for s in steps[tries:]]
            expect_equal(
                decisions,
                [False, True],
                what=f"{what}: stepped, when rank 1's inputs are huge, and afterwards",
                rank=rank,
                cause="not-skipped",
            )
            want = [2.0 ** (24 - k) for k in range(tries - 1)]
            want += [want[-1], want[-1] / 2, want[-1] / 2]
            expect_equal(
                [s[2] for s in steps],
                want,
                what=f"{what}: scales",
                rank=rank,
                cause="scale-after-overflow",
            )


@exercise("2.6", "virtual", asserts="no-target alone")
def test_window_without_targets_counts_for_nothing(impl, run, seed):
    """Without targets anywhere neither weights nor momentum nor the scale move."""

    def body(ctx):
        model = impl.module("mixed_precision").MixedPrecision(net(seed), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        scaler = impl.LossScaler(scale=256.0, growth_interval=2)
        some = window_of(seed, ctx.rank, [(4, 0)])
        impl.scaled_step(model, optimizer, scaler, some)
        before = [p.detach().clone() for p in model.parameters()]
        got = impl.scaled_step(model, optimizer, scaler, window_of(seed, 0, [(2, 2)] * ctx.rank))
        after = [p.detach().clone() for p in model.parameters()]
        scales = [plain(scaler.scale)]
        impl.scaled_step(model, optimizer, scaler, some)
        return plain(got), before, after, [*scales, plain(scaler.scale)]

    for rank, (answer, before, after, scales) in enumerate(run(body, 2)):
        numbers = expect_numbers(answer, [float, float, bool], "without targets", rank)
        same = all(map(torch.equal, before, after))
        expect_equal(
            [*numbers, same, *scales],
            [0.0, 0.0, False, True, 256.0, 512.0],
            rank=rank,
            cause="stepped",
            what="loss, norm, stepped, weights kept, scale, and the scale after another step, the "
            "second one with targets, which makes it grow",
        )


@exercise("2.6", "virtual", asserts="bad-limit refusals")
def test_bad_norm_is_refused_before_anything_is_sent(impl, run, seed):
    """A limit that is not positive: ValueError on every rank, no message, no gradient changed."""
    limits = (-1.5, 0.0, math.nan)

    def body(ctx):
        model = impl.module("mixed_precision").MixedPrecision(net(seed), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.full_like(p, 7.0)
        scaler, window = impl.LossScaler(), window_of(seed, ctx.rank, [(2, 0)])
        refused = [
            refusal(impl.scaled_step, model, optimizer, scaler, window, max_norm=limit)
            for limit in limits
        ]
        same = all(p.grad is not None and bool((p.grad == 7).all()) for p in model.parameters())
        return refused, same

    results = run(body, 2)
    for rank, (refused, same) in enumerate(results):
        expect_refusals(refused, [f"max_norm={limit}" for limit in limits], rank=rank)
        expect_equal(same, True, what="gradients as before", rank=rank, cause="too-late")
    sent = [len(log.events) for log in results.logs]
    expect_equal(sent, [0, 0], what="messages before max_norm was refused", cause="too-late")


@trace("2.6")
def trace_scaled_steps(impl):
    """Three steps of two micro-batches each on the digits, in float16."""
    digits()

    def body(ctx):
        images, labels = digits()[ctx.rank :: ctx.world_size]
        model = impl.module("mixed_precision").MixedPrecision(build_model("mlp", 0), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = impl.LossScaler()
        for step in ctx.steps(4):
            chosen = [slice(32 * k, 32 * k + 32) for k in range(2 * step, 2 * step + 2)]
            window = [(images[c], labels[c]) for c in chosen]
            impl.scaled_step(model, optimizer, scaler, window, max_norm=1.0)

    return body
