"""Checks of exercise 3.11: steps that fail on some ranks or on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail
from tests.phase3.breaking import Breaks

WIDTH, LAYERS, STEPS = 8, 4, 5


class Fragile(nn.Module):
    """Four layers with a counter; backward can break behind a layer, or behind the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, breaks: int | None = None) -> torch.Tensor:
        self.calls += 1
        if breaks == -1:  # every gradient of a parameter comes before
            x = Breaks.apply(x.requires_grad_())
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if breaks == k:
                x = Breaks.apply(x)
        return x


def fragile() -> Fragile:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Fragile().double()


def inputs(seed: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + 31 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def trained_alone(seed: int, ranks: Sequence[int], left_out: set[int]) -> list[torch.Tensor]:
    """The weights of one process that leaves out the steps that failed."""
    model = fragile()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        if step not in left_out:
            optimizer.zero_grad()
            for rank in ranks:
                (model(inputs(seed, rank, step)).square().mean() / len(ranks)).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(ctx, impl, seed: int, failing: dict[int, set[int]], *, agree: bool, breaks=1, group=None):
    """Train; ``failing``: ranks that fail by step. ``breaks``: behind which layer, None: abort().

    Returns for each step its outcome and the rank that StepAborted names, then the weights and the
    number of operations in flight at the end.
    """
    size = WIDTH * WIDTH * 8
    sizes = {"bucket_bytes": size, "first_bucket_bytes": size}
    wrapped = impl.DDP(fragile().to(ctx.device), group=group, agree=agree, **sizes)
    optimizer = optimizer_of(wrapped)
    said = []
    for step in range(STEPS):
        optimizer.zero_grad()
        fails = ctx.rank in failing.get(step, ())
        x = inputs(seed, ctx.rank, step).to(ctx.device)
        loss = wrapped(x, breaks=breaks if fails else None).square().mean()
        try:
            if fails and breaks is None:
                wrapped.abort()
                said.append(("gave up", None))
                continue
            loss.backward()
        except KeyError:
            said.append(("broke", None))
            continue
        except impl.StepAborted as error:
            left = any(p.grad is not None for p in wrapped.parameters())
            named = getattr(error, "rank", None)
            said.append(("told, gradients left" if left else "told", named))
            continue
        if any(p.grad is None for p in wrapped.parameters()):
            said.append(("None", None))
            continue
        nan = [bool(p.grad.isnan().all()) for p in wrapped.parameters()]
        if any(nan):
            said.append((f"NaN {nan.count(True)}", None))  # what a loss scaler would look for
            continue
        optimizer.step()
        said.append(("done", None))
    flying = sum(e.end is None for e in ctx.ledger.events)
    return said, [p.detach().clone() for p in wrapped.parameters()], flying


MEANS = {
    "done": "backward returned with gradients",
    "NaN 1": "backward returned with NaN in all of the first layer's gradient",
    "NaN 2": "backward returned with NaN in all of the first two layers' gradients",
    "NaN 3": "backward returned with NaN in all of the first three layers' gradients",
    "NaN 4": "backward returned with NaN in all gradients",
    "None": "backward returned, and there are parameters without a gradient",
    "told nobody": "backward raised StepAborted, whose rank is none (of the group) that gave up",
    "told": "backward raised StepAborted, whose rank is one that gave up; no gradients are left",
    "told, gradients left": "backward raised StepAborted, gradients are left",
    "broke": "backward raised what the layer raised",
    "gave up": "abort() returned",
}


def happened(seen: tuple[str, int | None], failed: set[int], members: Sequence[int]) -> str:
    """A key of MEANS; the rank of StepAborted has to be one of the group that failed."""
    what, named = seen
    if what == "told" and failed and named not in {members.index(rank) for rank in failed}:
        return "told nobody"
    return what


def check_steps(
    results,
    seed: int,
    failing: dict[int, set[int]],
    others: str,
    own: str,
    members: Sequence[int] = (0, 1, 2),
) -> None:
    trained = {rank: results[rank] for rank in members}
    want = trained_alone(seed, members, set(failing))
    for rank, (said, got, flying) in trained.items():
        for step in range(STEPS):
            who = failing.get(step, set())
            expected = "done" if not who else own if rank in who else others
            seen = happened(said[step], who, members)
            if seen != expected:
                ranks = (
                    f"rank {', '.join(map(str, sorted(who)))} failed"
                    if who
                    else "nobody of the group failed"
                )
                fail(
                    f"step {step}, {ranks}. Expected on rank {rank}: {MEANS[expected]}. "
                    f"What happened: {MEANS[seen]}",
                    cause="failure-not-told" if who else "next-step-broken",
                    rank=rank,
                )
        expect_equal(
            flying, 0, what="operations in flight at the end", rank=rank, cause="in-flight"
        )
        for k, value in enumerate(want):
            expect_close(
                got[k],
                value,
                what=f"weights of layer {k}, steps {sorted(failing)} left out",
                rank=rank,
                rtol=1e-9,
                atol=1e-11,
            )


@exercise("3.11", "virtual gloo cuda", asserts="told gives-up life alone refusals")
def test_a_failed_step_is_left_out_on_all_ranks(impl, run, seed, cases):
    """Backward raises on one rank, on two, on all: the other ranks are told, and
    the next step is right."""
    for breaks, failing in cases(
        (1, {0: {1}, 2: {0, 2}, 3: {0, 1, 2}}), (1, {1: {2}, 2: {2}}), (-1, {0: {2}, 3: {0}})
    ):

        def body(ctx):
            return train(ctx, impl, seed, failing, agree=True, breaks=breaks)

        check_steps(run(body, 3), seed, failing, others="told", own="broke")


@exercise("3.11", "virtual", asserts="told gives-up group")
def test_a_step_fails_in_a_group(impl, run, seed):
    """Ranks 1 and 3 of four agree among themselves, while 0 and 2 train and fail by themselves."""
    groups = {(1, 3): {2: {3}}, (0, 2): {0: {0}, 2: {0, 2}}}

    def body(ctx):
        made = [dist.new_group(list(members)) for members in groups]
        odd = ctx.rank % 2 == 1
        failing = groups[(1, 3) if odd else (0, 2)]
        return train(ctx, impl, seed, failing, agree=True, group=made[not odd])

    results = run(body, 4)
    for members, failing in groups.items():
        check_steps(results, seed, failing, others="told", own="broke", members=members)


@exercise("3.11", "virtual", asserts="told gives-up")
def test_a_rank_gives_up_without_backward(impl, run, seed):
    """abort() instead of backward: the other ranks are told, at the first step and later."""
    failing = {0: {1}, 3: {0, 2}}

    def body(ctx):
        return train(ctx, impl, seed, failing, agree=True, breaks=None)

    check_steps(run(body, 3), seed, failing, others="told", own="gave up")


@exercise("3.11", "virtual", asserts="nan-unagreed gives-up alone")
def test_without_agreement_the_others_find_nan(impl, run, seed):
    """With agree=False no rank hangs: missing gradients are NaN, and the next step is right."""
    failing = {1: {1}, 3: {0, 1, 2}}
    for breaks, others, own in ((1, "NaN 2", "broke"), (None, "NaN 4", "gave up")):

        def body(ctx):
            return train(ctx, impl, seed, failing, agree=False, breaks=breaks)

        check_steps(run(body, 3), seed, failing, others=others, own=own)


@exercise("3.11", "virtual", asserts="nan-unagreed mean")
def test_a_late_failure_leaves_the_others_the_mean(impl, run, seed):
    """With agree=False, and all gradients there when backward raises, the
    other ranks have the mean."""

    def body(ctx):
        wrapped = impl.DDP(fragile())
        got = []
        for step in range(2):
            wrapped.zero_grad()
            x, breaks = inputs(seed, ctx.rank, step), -1 if ctx.rank == step == 1 else None
            try:
                wrapped(x, breaks=breaks).sum().backward()
            except KeyError:
                wrapped.abort()
            got.append([None if p.grad is None else p.grad.clone() for p in wrapped.parameters()])
        return got

    for rank, got in enumerate(run(body, 2)):
        for step in range(2):
            if rank == step == 1:
                continue
            alone = fragile()
            for other in range(2):
                (alone(inputs(seed, other, step)).sum() / 2).backward()
            for k, (value, p) in enumerate(zip(got[step], alone.parameters(), strict=True)):
                what = f"layer {k}, step {step}; rank 1 failed in step 1 after its last gradient"
                expect_close(value, p.grad, what=what, rank=rank, rtol=1e-9, atol=1e-11)


@exercise("3.11", "virtual", asserts="gives-up nan-unagreed life")
def test_abort_leaves_no_gradient(impl, run, seed, cases):
    """A rank's accumulated gradients are gone after abort(); the other ranks
    don't take them for a mean."""
    size = WIDTH * WIDTH * 8
    for agree, breaks in cases((False, None), (True, None), (False, 1)):

        def body(ctx):
            sizes = {"bucket_bytes": size, "first_bucket_bytes": size}
            wrapped = impl.DDP(fragile(), agree=agree, **sizes)
            with wrapped.no_sync():
                wrapped(inputs(seed, ctx.rank, 0)).sum().backward()
            loss = wrapped(inputs(seed, ctx.rank, 1), breaks=None if ctx.rank else breaks).sum()
            try:
                if ctx.rank or breaks is not None:
                    loss.backward()
            except (KeyError, impl.StepAborted):
                pass
            if ctx.rank == 0:
                wrapped.abort()
            left = [
                "None" if p.grad is None else "NaN" if bool(p.grad.isnan().all()) else "numbers"
                for p in wrapped.parameters()
            ]
            wrapped.zero_grad()
            wrapped(inputs(seed, ctx.rank, 2)).sum().backward()
            return left, [p.grad.clone() for p in wrapped.parameters()]

        results = run(body, 2)
        alone = fragile()
        for rank in range(2):
            (alone(inputs(seed, rank, 2)).sum() / 2).backward()
        had = 0 if breaks is None else LAYERS - 1 - breaks  # gradients that came before the end
        told = ["None"] * LAYERS if agree else ["NaN"] * (LAYERS - had) + ["numbers"] * had
        for rank, (left, got) in enumerate(results):
            want = told if rank else ["None"] * LAYERS
            what = f"agree={agree}: gradients of {LAYERS} layers after rank 0, which had "
            what += "accumulated some, has called abort()"
            cause = "failure-not-told" if rank else "gradient-left"
            expect_equal(left, want, what=what, rank=rank, cause=cause)
            for value, p in zip(got, alone.parameters(), strict=True):
                what = "the step after abort()"
                expect_close(value, p.grad, what=what, rank=rank, rtol=1e-9, atol=1e-11)
