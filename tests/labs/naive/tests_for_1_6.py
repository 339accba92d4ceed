"""Naive: values on two ranks alone."""

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from distlab.grading import expect_close, expect_equal


def test_metrics_of_two(impl, run):
    """Loss and accuracy of two ranks."""

    def body(ctx):
        return list(impl.global_metrics(1.0 + ctx.rank, 1, 2))

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [0.75, 0.5], what="(loss, accuracy)", rank=rank)


def test_evaluate_of_two(impl, run):
    """Two shards of four samples."""

    def body(ctx):
        torch.manual_seed(0)
        model, inputs = nn.Linear(3, 2), torch.randn(8, 3)
        targets = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
        mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
        sampler = SequentialSampler(range(4))
        sampler.num_real = 4
        data = TensorDataset(inputs[mine], targets[mine])
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False))
        want = nn.functional.cross_entropy(model(inputs), targets)
        return impl.evaluate(model, loader)[0], want.item()

    for rank, (got, want) in enumerate(run(body, 2)):
        expect_close(torch.tensor(got), torch.tensor(want), what="the loss", rank=rank)
