"""Checks of exercises 1.3 to 1.5: how often the host waits for its GPU, by NCCL's rules."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F

from distlab.grading import exercise, expect_few_waits
from tests.phase1.loaders import data_of
from tests.phase1.test_trainer_loop import net


def own_batch(ctx, seed: int) -> list[torch.Tensor]:
    """Four samples of the rank's own, on its GPU."""
    tensors = data_of(seed, 4 * ctx.world_size).tensors
    return [t[ctx.rank :: ctx.world_size].to(ctx.device) for t in tensors]


@exercise("1.3", "nccl", asserts="host")
def test_broadcast_does_not_wait_for_the_gpu(impl, run, seed):
    """However many tensors there are, the host never waits for its GPU."""

    def body(ctx):
        model = net(seed, ctx.device)
        with ctx.region("step"):
            impl.broadcast_model_state(model)

    expect_few_waits(run(body, 2), 0, "broadcast_model_state")


@exercise("1.4", "nccl", asserts="host")
def test_averaging_hardly_waits_for_the_gpu(impl, run, seed):
    """However many parameters there are, the host waits for its GPU three times at most."""

    def body(ctx):
        model, (inputs, targets) = net(seed, ctx.device), own_batch(ctx, seed)
        F.cross_entropy(model(inputs), targets).backward()
        with ctx.region("step"):
            impl.average_gradients(model.parameters(), 4)

    expect_few_waits(run(body, 2), 3, "average_gradients")


@exercise("1.5", "nccl", asserts="host")
def test_a_step_hardly_waits_for_the_gpu(impl, run, seed):
    """However many parameters there are, the host waits for its GPU six times at most."""

    def body(ctx):
        model, (inputs, targets) = net(seed, ctx.device), own_batch(ctx, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with ctx.region("step"):
            impl.train_step(model, optimizer, inputs, targets)

    expect_few_waits(run(body, 2), 6, "train_step")
