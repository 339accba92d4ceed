"""Checks of exercises 2.1 to 2.3: how often the host waits for its GPU, by NCCL's rules."""

from __future__ import annotations

from distlab.grading import exercise, expect_few_waits
from tests.phase2.windows import Watched, expected, net, window_of

SHAPE = [(2, 0), (3, 1), (2, 0), (4, 0)]  # of a window


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
