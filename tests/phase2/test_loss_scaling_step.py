"""Checks of exercise 2.6: the whole step with a loss scale."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference.workloads import build_model, digits
from tests.phase2.half_precision import BF16, CLASSES, FP16, RANKS, plain, window_of


# -- 2.6 ------------------------------------------------------------------------------------------
@exercise("2.6", "virtual cuda")
def test_scaled_step_equals_one_process(impl, run, seed, cases):
    """Scale, accumulate, reduce, unscale, clip, step: the scale cancels, the norm is true."""
    for world_size, dtype, limit in cases((3, FP16, 0.05), (2, BF16, None), (4, FP16, 0.05)):
        shapes = RANKS[:world_size]

        def body(ctx, shapes=shapes, dtype=dtype, limit=limit):
            model = impl.module("mixed_precision").MixedPrecision(plain(seed).to(ctx.device), dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            window = window_of(seed, ctx.rank, shapes[ctx.rank], ctx.device)
            with ctx.region("step"):
                loss, norm, stepped = impl.scaled_step(
                    model, optimizer, impl.LossScaler(scale=4096.0), window, max_norm=limit
                )
            weights = {n: p.detach().cpu() for n, p in model.named_parameters()}
            return weights, float(loss), float(norm), bool(stepped)

        results = run(body, world_size)
        start = plain(seed)
        joined = [w for rank, shape in enumerate(shapes) for w in window_of(seed, rank, shape)]
        with torch.autocast("cpu", dtype=dtype):
            logits = start(torch.cat([x for x, _ in joined]))
        mean = F.cross_entropy(logits.float(), torch.cat([y for _, y in joined]))
        mean.backward()
        norm = float(torch.cat([p.grad.flatten() for p in start.parameters()]).norm())
        factor = 1.0 if limit is None else min(1.0, limit / norm)
        bound = 6 * torch.finfo(dtype).eps
        what = f"{world_size} ranks, {dtype}, loss scale 4096, clipped to {limit}"
        for rank, (weights, loss, length, stepped) in enumerate(results):
            expect_equal(stepped, True, what=f"{what}: stepped", rank=rank, cause="skipped")
            if abs(length - norm) > bound * norm:
                cause = "norm-scaled" if length > 100 * norm else "norm"
                fail(
                    f"{what}: the gradient's norm is {norm:g}, got {length:g}",
                    cause=cause,
                    rank=rank,
                )
            if abs(loss - float(mean)) > bound:
                fail(
                    f"{what}: the mean loss is {float(mean):g}, got {loss:g}",
                    cause="loss-value",
                    rank=rank,
                )
            for name, p in start.named_parameters():
                value = p.detach()
                expect_close(
                    weights[name],
                    value - factor * p.grad,
                    rank=rank,
                    before=value,
                    what=f"{what}: {name} after the step",
                    rtol=0.0,
                    atol=bound * factor * norm + 1e-6,
                )
        for log in results.logs:
            log = log.select(region="step")
            log.all_waited()
            if log.messages > 4:
                fail(
                    f"rank {log.rank} issued {log.messages} collectives, at most 4 are needed: "
                    "gradients, targets, loss, overflow",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@exercise("2.6", "virtual cuda")
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


@exercise("2.6", "virtual gloo cuda")
def test_overflow_changes_nothing_but_the_scale(impl, run, seed, cases):
    """Too large a scale, then one rank's huge inputs: all ranks skip, nothing else moves."""
    for world_size in cases(2, 3):

        def body(ctx):
            model = impl.module("mixed_precision").MixedPrecision(plain(seed).to(ctx.device), FP16)
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
                _, norm, stepped = impl.scaled_step(model, optimizer, scaler, window)
                steps.append([bool(stepped), float(scaler.scale), math.isfinite(norm)])
                states.append(state())

            states = [state()]
            while not (steps and steps[-1][0]) and len(steps) < 25:
                step(window)
            tries = len(steps)
            step(huge)
            step(window)
            return steps, states, tries

        results = run(body, world_size)
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
            for number, (stepped, same, *_) in enumerate(steps, 1):
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


@exercise("2.6", "virtual")
def test_window_without_targets_counts_for_nothing(impl, run, seed):
    """Without targets anywhere neither weights nor momentum nor the scale move."""

    def body(ctx):
        model = impl.module("mixed_precision").MixedPrecision(plain(seed), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        scaler = impl.LossScaler(growth_interval=1)
        before = [p.detach().clone() for p in model.parameters()]
        got = impl.scaled_step(model, optimizer, scaler, window_of(seed, 0, [(2, 2)] * ctx.rank))
        after = [p.detach() for p in model.parameters()]
        return list(map(float, got)), before, after, float(scaler.scale)

    for rank, (numbers, before, after, scale) in enumerate(run(body, 2)):
        same = all(map(torch.equal, before, after))
        expect_equal(
            [*numbers, same, scale],
            [0.0, 0.0, 0.0, True, 2.0**16],
            rank=rank,
            cause="stepped",
            what="loss, norm, stepped, weights kept, scale",
        )


@exercise("2.6", "virtual")
def test_bad_norm_is_refused_before_anything_is_sent(impl, run, seed):
    """A limit that is not positive: ValueError on every rank, no message, no gradient changed."""

    def body(ctx):
        model = impl.module("mixed_precision").MixedPrecision(plain(seed), FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        window = window_of(seed, ctx.rank, [(2, 0)])
        try:
            with ctx.region("step"):
                impl.scaled_step(model, optimizer, impl.LossScaler(), window, max_norm=-1.5)
        except ValueError as error:
            return str(error)
        return "no error"

    results = run(body, 2)
    for rank, said in enumerate(results):
        if "-1.5" not in said:
            fail(
                f"max_norm=-1.5: expected a ValueError with -1.5 in it, got {said}",
                cause="accepted",
                rank=rank,
            )
    sent = [len(log.select(region="step").events) for log in results.logs]
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
