"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close, expect_equal


def test_positions_of_two(impl, run):
    """Two ranks share out eight positions from both ends."""

    def body(ctx):
        return impl.own_positions([8], ctx.rank, 2).tolist()

    first, second = run(body, 2)
    expect_equal(first, [0, 1, 6, 7], what="the positions", rank=0)
    expect_equal(second, [2, 3, 4, 5], what="the positions", rank=1)


def test_attention_of_two(impl, run):
    """Two ranks have the causal attention of one process at their positions."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 3) for _ in range(3))

    def body(ctx):
        mine = impl.own_positions([8], ctx.rank, 2)
        return mine, impl.ring_attention(*(t[:, :, mine] for t in (q, k, v)))

    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for rank, (mine, got) in enumerate(run(body, 2)):
        expect_close(got, whole[:, :, mine], what="the result", rank=rank)
