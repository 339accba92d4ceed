"""Checks of exercises 2.1 to 2.3, 2.6 and 2.10: how often the host waits for its GPU."""

from __future__ import annotations

import torch.nn.functional as F

from distlab.grading import exercise, expect_few_waits
from tests.phase2.pipelines import batch, boundaries, cut, layers
from tests.phase2.windows import Watched, expected, net, window_of

SHAPE = [(2, 0), (3, 1), (2, 0), (4, 0)]  # of a window
PER, M = 2, 4  # samples of a micro-batch, micro-batches


@exercise("2.1", "nccl", asserts="host")
def test_a_window_waits_once_for_the_gpu(impl, run, seed):
    """However many micro-batches there are, the host waits for its GPU once at most."""

    def body(ctx):
        model, window = Watched().to(ctx.device), window_of(seed, 0, SHAPE, ctx.device)
        with ctx.region("step"):
            impl.accumulate(model, window, 10)

    expect_few_waits(run(body, 1), 1, "accumulate, 4 micro-batches")


@exercise("2.2", "nccl", asserts="host")
def test_a_reduced_window_waits_four_times_for_the_gpu(impl, run, seed):
    """However many micro-batches there are, the host waits for its GPU four times at most."""

    def body(ctx):
        model, window = net(seed).to(ctx.device), window_of(seed, ctx.rank, SHAPE, ctx.device)
        with ctx.region("step"):
            impl.accumulate_and_reduce(model, window)

    expect_few_waits(run(body, 2), 4, "accumulate_and_reduce, 4 micro-batches")


@exercise("2.3", "nccl", asserts="host")
def test_the_norm_is_read_once(impl, run, seed):
    """However many gradients there are, the host waits for its GPU once, for the norm."""

    def body(ctx):
        model = net(seed).to(ctx.device)
        expected(model, [window_of(seed, 0, SHAPE, ctx.device)], 1)
        with ctx.region("step"):
            impl.clip_by_global_norm(model.parameters(), 1e-3)

    expect_few_waits(run(body, 1), 1, "clip_by_global_norm")


@exercise("2.6", "nccl", asserts="host")
def test_unscaling_waits_once_for_the_gpu(impl, run, seed):
    """However many gradients there are, the host waits for its GPU once, for all ranks' number."""

    def body(ctx):
        model = net(seed).to(ctx.device)
        expected(model, [window_of(seed, 0, SHAPE, ctx.device)], 1)
        scaler = impl.LossScaler(scale=4.0)
        with ctx.region("step"):
            scaler.unscale(model.parameters())

    expect_few_waits(run(body, 2), 1, "unscale")


@exercise("2.10", "nccl", asserts="host")
def test_a_pipelined_step_waits_once_for_the_gpu(impl, run, seed):
    """However many micro-batches there are, the host waits for its GPU once, for the loss."""

    def body(ctx):
        parts = cut([layer.to(ctx.device) for layer in layers(seed)], 2)
        x, y = (t.to(ctx.device) for t in batch(seed, M * PER))
        shapes = boundaries(parts, x[:PER])
        schedule = impl.make_schedule("gpipe", 2, M)
        pipeline = impl.Pipeline([parts[ctx.rank]], schedule, F.cross_entropy, shapes)
        with ctx.region("step"):
            pipeline.step(x, y)

    expect_few_waits(run(body, 2), 1, "a step of 4 micro-batches")
