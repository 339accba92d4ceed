"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_pair_of_two(impl, run):
    """Sums forward and backward on two ranks."""

    def body(ctx):
        x = torch.ones(3, requires_grad=True)
        y = impl.sum_over_ranks(impl.copy_to_ranks(x) * (ctx.rank + 1))
        y.sum().backward()
        return y.detach(), x.grad

    for rank, (y, grad) in enumerate(run(body, 2)):
        expect_close(y, torch.full((3,), 3.0), what="the sum", rank=rank)
        expect_close(grad, torch.full((3,), 3.0), what="the gradient", rank=rank)
