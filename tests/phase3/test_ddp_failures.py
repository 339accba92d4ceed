"""Checks of exercise 3.11: steps that fail on some ranks or on all."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail

WIDTH, LAYERS, STEPS = 8, 4, 5


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("the second layer broke, as asked for")


class Fragile(nn.Module):
    """Four layers with a counter; the backward of the second can break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, breaks: bool = False) -> torch.Tensor:
        self.calls += 1
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if breaks and k == 1:
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


def train(
    ctx, impl, seed: int, failing: dict[int, set[int]], *, agree: bool, call_abort=False, group=None
):
    """Train; ``failing``: ranks that fail by step.

    Returns for each step what happened and the text of StepAborted, then the weights and the number
    of operations in flight at the end.
    """
    size = WIDTH * WIDTH * 8
    sizes = {"bucket_bytes": size, "first_bucket_bytes": size}
    wrapped = impl.DDP(fragile(), group=group, agree=agree, **sizes)
    optimizer = optimizer_of(wrapped)
    said = []
    for step in range(STEPS):
        optimizer.zero_grad()
        fails = ctx.rank in failing.get(step, ())
        loss = wrapped(inputs(seed, ctx.rank, step), breaks=fails).square().mean()
        try:
            if fails and call_abort:
                wrapped.abort()
                said.append(("gave up", ""))
                continue
            loss.backward()
        except KeyError:
            said.append(("broke", ""))
            continue
        except impl.StepAborted as error:
            left = any(p.grad is not None for p in wrapped.parameters())
            said.append(("told, gradients left" if left else "told", str(error)))
            continue
        if any(p.grad is None for p in wrapped.parameters()):
            said.append(("None", ""))
            continue
        if any(bool(p.grad.isnan().any()) for p in wrapped.parameters()):
            said.append(("NaN", ""))  # what a loss scaler would look for
            continue
        optimizer.step()
        said.append(("done", ""))
    flying = sum(e.end is None for e in ctx.ledger.events)
    return said, [p.detach().clone() for p in wrapped.parameters()], flying


MEANS = {
    "done": "backward returned with gradients",
    "NaN": "backward returned with NaN in the gradients",
    "None": "backward returned, and there are parameters without a gradient",
    "told nobody": "backward raised StepAborted, which names no rank (of the group) that gave up",
    "told": "backward raised StepAborted, which names a rank that gave up; no gradients are left",
    "told, gradients left": "backward raised StepAborted, gradients are left",
    "broke": "backward raised what the layer raised",
    "gave up": "abort() returned",
}


def happened(seen: tuple[str, str], failed: set[int], members: list[int]) -> str:
    """A key of MEANS; the text of StepAborted has to name a rank of the group that failed."""
    what, text = seen
    numbers = {str(members.index(rank)) for rank in failed}
    if what == "told" and numbers and not numbers & {*re.findall(r"\d+", text)}:
        return "told nobody"
    return what


def check_steps(results, seed: int, failing: dict[int, set[int]], others: str, own: str) -> None:
    trained = {rank: each for rank, each in enumerate(results) if each is not None}
    want = trained_alone(seed, list(trained), set(failing))
    for rank, (said, got, flying) in trained.items():
        for step in range(STEPS):
            who = failing.get(step, set())
            expected = "done" if not who else own if rank in who else others
            seen = happened(said[step], who, list(trained))
            if seen != expected:
                ranks = (
                    f"rank {', '.join(map(str, sorted(who)))} failed" if who else "nobody failed"
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


@exercise("3.11", "virtual gloo cuda")
def test_a_failed_step_is_left_out_on_all_ranks(impl, run, seed, cases):
    """Backward raises on one rank, on two, on all: the others are told; the next step is right."""
    for failing in cases({0: {1}, 2: {0, 2}, 3: {0, 1, 2}}, {1: {2}, 2: {2}}):

        def body(ctx):
            return train(ctx, impl, seed, failing, agree=True)

        check_steps(run(body, 3), seed, failing, others="told", own="broke")


@exercise("3.11", "virtual")
def test_a_step_fails_in_a_group(impl, run, seed):
    """Ranks 1 and 2 of three train and agree among themselves; the buffers are rank 1's."""
    failing = {2: {2}}

    def body(ctx):
        group = dist.new_group([1, 2])
        return train(ctx, impl, seed, failing, agree=True, group=group) if ctx.rank else None

    check_steps(run(body, 3), seed, failing, others="told", own="broke")


@exercise("3.11", "virtual")
def test_a_rank_gives_up_without_backward(impl, run, seed):
    """abort() instead of backward: the others are told, at the first step and later."""
    failing = {0: {1}, 3: {0, 2}}

    def body(ctx):
        return train(ctx, impl, seed, failing, agree=True, call_abort=True)

    check_steps(run(body, 3), seed, failing, others="told", own="gave up")


@exercise("3.11", "virtual")
def test_without_agreement_the_others_find_nan(impl, run, seed):
    """With agree=False nobody hangs: what had not come is NaN, and the next step is right."""
    failing = {1: {1}, 3: {0, 1, 2}}

    def body(ctx):
        return train(ctx, impl, seed, failing, agree=False)

    check_steps(run(body, 3), seed, failing, others="NaN", own="broke")


@exercise("3.11", "virtual")
def test_abort_leaves_no_gradient(impl, run, seed):
    """After abort() this rank has no gradients, and what it had accumulated is gone."""

    def body(ctx):
        wrapped = impl.DDP(fragile(), agree=True)
        with wrapped.no_sync():
            wrapped(inputs(seed, ctx.rank, 0)).sum().backward()
        wrapped(inputs(seed, ctx.rank, 1))
        wrapped.abort()
        left = [p.grad is not None for p in wrapped.parameters()]
        wrapped(inputs(seed, ctx.rank, 2)).sum().backward()
        return any(left), [p.grad.clone() for p in wrapped.parameters()]

    results = run(body, 2)
    alone = fragile()
    for rank in range(2):
        (alone(inputs(seed, rank, 2)).sum() / 2).backward()
    for rank, (left, got) in enumerate(results):
        expect_equal(left, False, what="gradients after abort()", rank=rank, cause="gradient-left")
        for value, p in zip(got, alone.parameters(), strict=True):
            expect_close(
                value, p.grad, what="the step after abort()", rank=rank, rtol=1e-9, atol=1e-11
            )
