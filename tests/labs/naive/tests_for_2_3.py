"""Naive: values on two ranks alone."""

import torch
from torch import nn

from distlab.grading import expect_equal


def test_norm_is_cut(impl, run):
    """A norm of 5 becomes 1."""

    def body(ctx):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        norm = impl.clip_by_global_norm([parameter], 1.0)
        return norm, [round(g, 5) for g in parameter.grad.tolist()]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(list(got), [5.0, [0.6, 0.8]], what="norm and gradient", rank=rank)
