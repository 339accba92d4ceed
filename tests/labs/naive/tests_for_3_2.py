"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_gather_of_two(impl, run):
    """Two ranks have both chunks."""

    def body(ctx):
        tensor = torch.zeros(4)
        tensor[2 * ctx.rank : 2 * ctx.rank + 2] = 1.0 + ctx.rank
        impl.ring_all_gather(tensor)
        return tensor

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, torch.tensor([1.0, 1.0, 2.0, 2.0]), what="all chunks", rank=rank)
