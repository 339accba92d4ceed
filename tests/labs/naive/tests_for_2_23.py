"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_positions_of_two(impl, run):
    """Two ranks have all positions of their heads."""
    torch.manual_seed(0)
    whole = torch.randn(1, 4, 6, 3)

    def body(ctx):
        (mine,) = impl.heads_for_positions([whole.chunk(2, 2)[ctx.rank]])
        return mine

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, whole.chunk(2, 1)[rank], what="the heads", rank=rank)


def test_attention_of_two(impl, run):
    """Two ranks have the causal attention of one process at their positions."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 4, 6, 3) for _ in range(3))

    def body(ctx):
        return impl.all_to_all_attention(*(t.chunk(2, 2)[ctx.rank] for t in (q, k, v)))

    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for rank, got in enumerate(run(body, 2)):
        expect_close(got, whole.chunk(2, 2)[rank], what="the result", rank=rank)
