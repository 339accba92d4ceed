"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_sum_of_two(impl, run):
    """The sum of two ranks' tensors."""

    def body(ctx):
        tensor = torch.arange(4.0) + ctx.rank
        impl.halving_doubling_all_reduce(tensor)
        return tensor

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, 2 * torch.arange(4.0) + 1, what="the sum", rank=rank)
