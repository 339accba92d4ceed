"""Checks of exercises 3.10, 3.11 and 3.13 to 3.15: how often the host waits for its GPU."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank

from distlab.grading import exercise, expect_few_waits
from tests.phase3 import fsdp_models, test_ddp, test_overlap, zero_models

STEPS = 2  # of which the first is not counted: it learns in which order gradients come


@exercise("3.10", "nccl", asserts="host")
def test_backward_does_not_wait_for_the_gpu(impl, run, seed):
    """From the second backward on the host never waits for its GPU."""

    def body(ctx):
        model = impl.BucketedDDP(test_overlap.net(seed).to(ctx.device), bucket_bytes=200)
        for step in range(STEPS):
            loss = test_overlap.loss_of(model, seed, ctx.rank, step)
            with ctx.region("step" if step else "first"):
                loss.backward()

    expect_few_waits(run(body, 2), 0, "the second backward")


@exercise("3.11", "nccl", asserts="host")
def test_only_agreeing_waits_for_the_gpu(impl, run, seed):
    """The host waits for its GPU twice at most in a backward if the ranks agree, else never."""

    def body(ctx):
        for agree in (False, True):
            model = impl.DDP(test_ddp.switch(seed).to(ctx.device), agree=agree)
            for step in range(STEPS):
                loss = test_ddp.loss_of(model, seed, ctx.rank, step, "a")
                with ctx.region(f"agree={agree}" if step else "first"):
                    loss.backward()

    results = run(body, 2)
    for agree, most in ((False, 0), (True, 2)):
        expect_few_waits(results, most, f"a backward, agree={agree}", f"agree={agree}")


@exercise("3.13", "nccl", asserts="host")
def test_a_step_does_not_wait_for_the_gpu(impl, run, seed):
    """With an inner optimizer that does not wait for the GPU the host does not, either."""

    def body(ctx):
        model = zero_models.awkward(seed, ctx.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = impl.ZeroOptimizer(parameters, torch.optim.SGD, lr=0.1, bucket_bytes=300)
        zero_models.mean_gradients(model, seed, 2, 0, ctx.device)
        with ctx.region("step"):
            optimizer.step()

    expect_few_waits(run(body, 2), 0, "step")


@exercise("3.14", "nccl", asserts="host")
def test_backward_waits_twice_for_the_gpu(impl, run, seed):
    """The host waits for its GPU twice at most in a backward, and once for the norm."""

    def body(ctx):
        model = zero_models.awkward(seed, ctx.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = impl.Zero2Optimizer(parameters, torch.optim.SGD, lr=0.1, bucket_bytes=300)
        loss = zero_models.loss_of(model, seed, ctx.rank, 0, ctx.device)
        with ctx.region("backward"):
            loss.backward()
        with ctx.region("clip"):
            optimizer.clip_by_global_norm(1e-3)

    results = run(body, 2)
    expect_few_waits(results, 2, "a backward", "backward")
    expect_few_waits(results, 1, "clip_by_global_norm", "clip")


@exercise("3.15", "nccl", asserts="host")
def test_sharding_does_not_wait_for_the_gpu(impl, run, seed):
    """In forward and backward the host never waits for its GPU, and once for the norm."""

    def body(ctx):
        inner = fsdp_models.net(seed, ctx.device)
        model = impl.FSDP(inner, inner.units())
        data = fsdp_models.batch(seed, ctx.rank, device=ctx.device)
        with ctx.region("step"):
            fsdp_models.loss_of(model, data).backward()
        with ctx.region("clip"):
            impl.clip_by_global_norm(model, 1e-3)

    results = run(body, 2)
    expect_few_waits(results, 0, "forward and backward")
    expect_few_waits(results, 1, "clip_by_global_norm", "clip")
