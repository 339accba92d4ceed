"""Checks of exercise 3.14: the gradients on their owners only, in the bytes of an all-reduce."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn
from zero_models import (
    BUCKET,
    LIMIT,
    MATRIX,
    WHOLE,
    Equal,
    awkward,
    compare,
    groups_of,
    loss_of,
    mean_gradients,
    traced,
    values_of,
)

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.memory import PeakMemory

PLAN = (1, 2, 1)  # backward passes before each step


@exercise("3.14", "virtual gloo cuda")
def test_training_equals_one_process(impl, run, seed, cases):
    """Accumulation and clipping, parameters of one rank only or of none: as one process."""

    def body(ctx):
        model = awkward(seed, ctx.device)
        optimizer = impl.Zero2Optimizer(
            groups_of(model), torch.optim.AdamW, lr=0.05, bucket_bytes=BUCKET
        )
        norms = []
        for step, passes in enumerate(PLAN):
            optimizer.zero_grad()
            for k in range(passes):
                loss_of(model, seed, ctx.rank, 10 * step + k, ctx.device).backward()
            norms.append(float(optimizer.clip_by_global_norm(LIMIT)))
            optimizer.step()
        return norms, values_of(model)

    sizes = cases(3, 2, 5, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        alone = awkward(seed)
        plain = torch.optim.AdamW(groups_of(alone), lr=0.05)
        want = []
        for step, passes in enumerate(PLAN):
            plain.zero_grad()
            for k in range(passes):
                mean_gradients(alone, seed, world_size, 10 * step + k)
            want.append(float(nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)))
            plain.step()
        for rank, (norms, got) in enumerate(results):
            for step, (norm, right) in enumerate(zip(norms, want, strict=True)):
                if abs(norm - right) > 1e-6 * right:
                    fail(
                        f"{world_size} ranks: the norm of the whole mean gradient in step {step} "
                        f"is {right:.6g}, got {norm:.6g}",
                        cause="norm",
                        rank=rank,
                    )
            if not torch.equal(got["unused"], torch.ones(5, dtype=torch.float64)):
                fail("unused has no gradient and moved", cause="moved", rank=rank)
            compare(got, values_of(alone), f"{world_size} ranks", rank)


@exercise("3.14", "virtual")  # gloo's threads drop their buffers a moment after the wait
def test_gradients_are_one_part_of_w(impl, run, seed):
    """After backward 4Ψ/W bytes of gradients are alive, and at no time all of them."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX)
        x = torch.ones(1, 32)
        with PeakMemory() as memory:
            model(x).sum().backward()
            after, peak = memory.current, memory.peak
            optimizer.zero_grad()
            return after, peak, memory.current

    sizes = (4, 2)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for rank, (after, peak, cleared) in enumerate(results):
            part = WHOLE / world_size + 2500
            for held, limit, when, cause in (
                (after, part, "after backward", "too-much-memory"),
                (cleared, 2500, "after zero_grad", "not-cleared"),
                (peak, part + 7 * MATRIX, "in backward", "high-peak"),
            ):
                if held > limit:
                    fail(
                        f"rank {rank} of {world_size} holds {held:,} B {when}, expected at most "
                        f"{limit:,.0f} B of {WHOLE:,} B of gradients: reduce a bucket when it is "
                        "complete, and keep the owner's part only",
                        cause=cause,
                        rank=rank,
                    )


@exercise("3.14", "virtual gloo")
def test_bytes_of_a_step(impl, run, seed):
    """Backward and step send (W-1)/W·P bytes each, one half of an all-reduce."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(
            model.parameters(), torch.optim.Adam, bucket_bytes=2 * MATRIX
        )
        with ctx.region("backward"):
            model(torch.ones(1, 32)).sum().backward()
        with ctx.region("step"):
            optimizer.step()

    sizes = (4, 2, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        budget = (world_size - 1) / world_size * WHOLE
        for log in results.logs:
            log.all_waited()
            for region in ("backward", "step"):
                log.select(region=region).sent_at_most(budget + 300, "(W-1)/W·P")


@exercise("3.14", "virtual")
def test_gradients_leave_during_backward(impl, run, seed):
    """The last layer's gradient is on its way before the first layer's exists."""

    def body(ctx):
        model = Equal()
        impl_optimizer = impl.Zero2Optimizer(
            model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX
        )
        issued = []
        first = model.layers[0].weight
        first.register_hook(lambda _: issued.append([p.grad is None for p in model.parameters()]))
        model(torch.ones(1, 32)).sum().backward()
        left = all(p.grad is None for p in model.parameters())
        impl_optimizer.step()
        return sum(issued[0]), left

    for rank, (gone, left) in enumerate(run(body, 2)):
        if gone < 10:
            fail(
                f"when the first layer's gradient came, only {gone} of 12 parameters were without "
                "one: send a bucket as soon as it is complete, and free it",
                cause="no-overlap",
                rank=rank,
            )
        expect_equal(left, True, what="grad is None after backward", rank=rank, cause="not-freed")


@trace("3.14")
def trace_zero2(impl):
    """Two steps of twelve equal layers in four buckets."""
    return traced(lambda *args, **options: impl.Zero2Optimizer(*args, **options))
