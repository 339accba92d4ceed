"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_chunk_of_two(impl, run):
    """Each of two ranks has the sum in its chunk."""

    def body(ctx):
        tensor = torch.arange(4.0) + ctx.rank
        impl.ring_reduce_scatter(tensor)
        return tensor

    want = 2 * torch.arange(4.0) + 1
    for rank, got in enumerate(run(body, 2)):
        expect_close(
            got[2 * rank : 2 * rank + 2], want[2 * rank : 2 * rank + 2], what="the chunk", rank=rank
        )
