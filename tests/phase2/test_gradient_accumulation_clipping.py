"""Checks of exercise 2.3: the global norm, and the clipped step."""

from __future__ import annotations

import math

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refusals, fail, refusal
from tests.phase2.windows import (
    RANKS,
    counted,
    expect_number,
    expect_numbers,
    expected,
    formula,
    gradients,
    net,
    plain,
    window_of,
)

INF = float("inf")


def drawn(seed: int, *sizes: float) -> list[Tensor]:
    """Gradients of several dtypes and layouts whose elements are about as large as ``sizes``."""
    generator = torch.Generator().manual_seed(seed)

    def one(size: float, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * size

    return [
        one(sizes[0], (5, 3)),
        one(sizes[1], (4, 6)).float().t(),
        one(sizes[2], (7,)).half(),
        one(sizes[3], (9,)).bfloat16(),
        one(sizes[0], ()),
        one(sizes[0], (0, 3)),
    ]


def infinite(seed: int, value: float) -> list[Tensor]:
    """One element of the second gradient is not finite."""
    every = drawn(seed, 1.0, 1.0, 1.0, 1.0)
    every[1][1, 2] = value
    return every


def clip_cases(seed: int) -> dict[str, tuple[list[Tensor], float]]:
    """The gradients to clip, and the limit."""
    ones = drawn(seed, 1.0, 1.0, 1.0, 1.0)
    return {
        "clipped to 2": (ones, 2.0),
        "within the limit": (ones, 1e4),
        "without limit": (ones, INF),
        "that are small": (drawn(seed, 1e-4, 1e-4, 1e-3, 1e-4), 1e-5),
        "whose squares are too large for float16": (drawn(seed, 1.0, 1.0, 900.0, 1.0), 2e4),
        "whose squares are too large for float32": (drawn(seed, 1e5, 3e22, 1.0, 1.0), 1e22),
        "with an infinity": (infinite(seed, INF), 1.0),
        "with a NaN": (infinite(seed, float("nan")), 1.0),
        "that are zero": (drawn(seed, 0.0, 0.0, 0.0, 0.0), 1.0),
        "of which there are none": ([], 1.0),
    }


@exercise(
    "2.3",
    "virtual",
    asserts="one-factor norm-before float64 in-place within listed-twice missing not-finite "
    "refused dtype layout parameters life refusals no-communication",
)
def test_clipping_scales_all_by_one_factor(impl, run, seed):
    """The joint norm of all gradients, tied once; small and infinite gradients are left alone."""
    bad = (0.0, -1.0, float("nan"))

    def body(ctx):
        out = []
        for given, limit in clip_cases(seed).values():
            parameters = [nn.Parameter(torch.zeros_like(g)) for g in given]
            if given:  # two parameters in the same memory: each of them counts
                parameters[4] = nn.Parameter(parameters[0].detach()[0, 0])
            views = [g.clone() for g in given]  # clone keeps the layout
            for p, g in zip(parameters, views, strict=True):
                p.grad = g
            for p in parameters[3:5]:
                p.requires_grad_(False)  # all gradients count
            missing = nn.Parameter(torch.ones(2))
            norm = impl.clip_by_global_norm(iter([missing, *parameters[1:], *parameters]), limit)
            same = all(p.grad is g for p, g in zip(parameters, views, strict=True))
            out.append((plain(norm), views, same, missing.grad is None))
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        refused = [refusal(impl.clip_by_global_norm, [p], limit) for limit in bad]
        return out, refused, p.grad

    results = run(body, 1)
    out, refused, kept = results[0]
    for (what, (before, limit)), (norm, after, same, missing) in zip(
        clip_cases(seed).items(), out, strict=True
    ):
        expect_clipped(f"gradients {what}", before, limit, norm, after)
        expect_equal(same, True, what=f"gradients {what}: clipped in place", cause="not-in-place")
        expect_equal(missing, True, what="a missing gradient stays missing", cause="made-gradient")
    expect_refusals(refused, ["a limit of 0", "a limit of -1", "a limit of NaN"])
    expect_equal(kept.tolist(), [1.0] * 3, what="gradients after a refusal", cause="late-check")
    expect_equal(len(results.logs[0].events), 0, what="messages", cause="communicates")


def expect_clipped(
    what: str, before: list[Tensor], limit: float, norm: object, after: list[Tensor]
) -> None:
    """The norm in float64, and every gradient times one factor if the norm is beyond the limit."""
    flat = torch.cat([torch.zeros(0, dtype=torch.float64), *(g.double().flatten() for g in before)])
    want = float(flat.norm())
    (got,) = expect_numbers((norm,), [float], f"{what}: the norm", 0)
    if not math.isfinite(want):
        if math.isfinite(got) or any(
            not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            for a, b in zip(before, after, strict=True)
        ):
            message = f"{what}: the norm is {want}, so nothing changes; got a norm of {got}"
            fail(f"{message} and {after[1].flatten()[:8].tolist()}", cause="not-finite")
        return
    if not abs(got - want) <= 1e-6 * want:
        fail(f"{what}: the norm before is {want:.9g}, got {got:.9g}", cause="norm")
    factor = limit / want if want > limit else 1.0
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if factor == 1.0 and not torch.equal(old, new):
            fail(f"{what}: gradient {index} was changed", cause="within-limit")
        part = 1e-5 if old.dtype in (torch.float32, torch.float64) else 1e-2
        expect_close(
            new,
            (old.double() * factor).to(old.dtype),
            what=f"{what}: gradient {index}, of norm {want:.6g}, clipped to {limit:g}",
            rules=[
                formula(
                    "epsilon",
                    "a small number was added to the norm before the division",
                    (old.double() * limit / (want + 1e-6)).to(old.dtype),
                )
            ],
            rtol=part,
            atol=part * factor * float(old.double().abs().max() if old.numel() else 0),
        )


@exercise(
    "2.3",
    "virtual gloo cuda",
    asserts="one-process unscaled step frozen returned alone",
)
def test_clipped_step_equals_one_process(impl, run, seed, cases):
    """Reduce, unscale, clip, step: weights, loss and norm are those of one process."""
    for world_size, scale, limit in cases((3, 64.0, 0.05), (2, 2.0, 0.05), (4, 4.0, None)):
        check_step(run, impl, seed, RANKS[:world_size], scale, limit, [])


@exercise("2.3", "virtual", asserts="group dtype parameters")
def test_only_the_groups_ranks_step_together(impl, run, seed):
    """Ranks 1 and 3 step together by their own targets, and so do ranks 0 and 2; four dtypes."""
    shapes = [RANKS[3], RANKS[0], RANKS[4], RANKS[1]]
    check_step(run, impl, seed, shapes, 4.0, 0.05, [[3, 1], [0, 2]])


DECAY = 0.1
LEFT_OUT = "head.bias"  # trainable, and the optimizer does not have it


def moves(name: str, p: Tensor) -> bool:
    return p.requires_grad and name != LEFT_OUT


def stepped(model: nn.Module, factor: float) -> dict[str, Tensor]:
    """The parameters after an SGD step with learning rate 1 on ``factor`` times the gradients."""
    return {
        name: (p - p.grad * factor - DECAY * p if moves(name, p) else p).detach()
        for name, p in model.named_parameters()
    }


def check_step(
    run, impl, seed: int, shapes: list, scale: float, limit: float | None, groups: list
) -> None:
    mixed = bool(groups)

    def body(ctx):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = [g for g, ranks in zip(made, groups, strict=True) if ctx.rank in ranks]
        model = net(seed, mixed).to(ctx.device)
        for p in model.frozen.parameters():
            p.grad = torch.full_like(p, 9.0)
        every = [p for n, p in model.named_parameters() if n != LEFT_OUT]
        parts = [{"params": every[::2]}, {"params": every[1::2]}]
        optimizer = torch.optim.SGD(parts, lr=1.0, weight_decay=DECAY)
        answer = impl.train_window(
            model,
            optimizer,
            window_of(seed, ctx.rank, shapes[ctx.rank], ctx.device),
            max_norm=limit,
            loss_scale=scale,
            group=mine[0] if mine else None,
        )
        return plain(answer), {n: p.detach() for n, p in model.named_parameters()}

    results = run(body, len(shapes))
    every = [window_of(seed, rank, shape) for rank, shape in enumerate(shapes)]
    for ranks in groups or [list(range(len(shapes)))]:
        members = sorted(ranks)
        total = sum(counted(shapes[r]) for r in members)
        model = net(seed, mixed)
        mean = expected(model, [every[r] for r in members], total) / total
        trainable = [g for n, g in gradients(model).items() if not n.startswith("frozen")]
        norm = float(torch.cat([g.double().flatten() for g in trainable]).norm())
        factor = 1.0 if limit is None else min(1.0, limit / norm)
        start, want = dict(net(seed, mixed).named_parameters()), stepped(model, factor)
        what = f"ranks {members}, loss scale {scale:g}, clipped to {limit}"
        for rank in members:
            answer, weights = results[rank]
            loss, got = expect_numbers(answer, [float, float], what, rank)
            expect_number(loss, mean, f"{what}: the mean loss", "loss-value", rank)
            if not abs(got - norm) <= (2e-2 if mixed else 1e-6) * norm:
                message = f"{what}: the gradient's norm is {norm:.9g}, got {got:.9g}"
                fail(message, cause=norm_cause(got, norm, scale), rank=rank)
            moved = [n for n, p in start.items() if not p.requires_grad]
            moved = [n for n in moved if not torch.equal(weights[n], start[n])]
            if moved:
                message = f"{what}: the optimizer has moved {', '.join(moved)}, which are frozen"
                fail(message + ": it steps what has a gradient", cause="frozen-moved", rank=rank)
            for name, p in start.items():
                expect_close(
                    weights[name],
                    want[name],
                    what=f"{what}: {name} after the step",
                    rank=rank,
                    before=None if torch.equal(p, want[name]) else p.detach(),
                    rtol=1e-2 if mixed else 1e-6,
                    atol=1e-3 if mixed else 1e-9,
                )


def norm_cause(got: float, norm: float, scale: float) -> str:
    """Scaled by the loss scale, or some other norm."""
    return "norm-scaled" if scale > 1 and abs(got / norm - scale) < 1e-3 * scale else "norm"


@exercise("2.3", "virtual", asserts="no-target bad-limit alone life refusals")
def test_window_without_targets_steps_nothing(impl, run, seed):
    """Without targets nothing moves, by momentum or decay either, nor with a limit of -1 or 0."""
    limits = (0.0, -1.0, float("nan"))

    def body(ctx):
        model = net(seed)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=1.0, momentum=0.9, weight_decay=0.1)
        impl.train_window(model, optimizer, window_of(seed, 0, [(3, 0)]))
        before = [p.detach().clone() for p in trainable]
        empty = window_of(seed, 0, [(2, 2)]) if ctx.rank else []
        got = impl.train_window(model, optimizer, empty, max_norm=1.0, loss_scale=2.0)
        refused = [
            refusal(impl.train_window, model, optimizer, window_of(seed, 0, [(3, 0)]), max_norm=n)
            for n in limits
        ]
        return plain(got), before, [p.detach() for p in trainable], refused

    for rank, (got, before, after, refused) in enumerate(run(body, 2)):
        expect_refusals(refused, [f"train_window with max_norm={n}" for n in limits], rank=rank)
        expect_numbers(got, [float, float], "without targets", rank)
        expect_equal(list(got), [0.0, 0.0], what="loss and norm", rank=rank, cause="no-target")
        if not all(map(torch.equal, before, after)):
            fail("a window without targets moved the weights", cause="no-target", rank=rank)


@exercise("2.3", "virtual", asserts="cost step life")
def test_the_step_sends_nothing_more(impl, run, seed):
    """The gradients and two numbers travel, nothing for the norm; the optimizer steps once."""

    def body(ctx):
        model = net(seed)
        steps = []

        class Counting(torch.optim.SGD):
            def step(self, *args):
                steps.append(ctx.rank)
                return super().step(*args)

        optimizer = Counting([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            impl.train_window(model, optimizer, window_of(seed, ctx.rank, [(3, 0)]), max_norm=0.1)
        return len(steps)

    results = run(body, 2)
    for rank, steps in enumerate(results):
        expect_equal(steps, 2, what="optimizer steps in two windows", rank=rank, cause="steps")
    for log in results.logs:
        log.all_waited()
        if len(log.events) > 6:
            fail(
                f"rank {log.rank} issued {len(log.events)} collectives for two windows, at most 6 "
                "are needed. The norm of the reduced gradient is known to every rank",
                cause="too-many-messages",
                rank=log.rank,
            )
