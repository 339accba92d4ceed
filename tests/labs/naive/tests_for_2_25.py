"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close


def test_rows_of_two(impl, run):
    """Two ranks give each other a row each."""

    def body(ctx):
        rows = torch.tensor([[1.0], [2.0]]) + 10 * ctx.rank
        return impl.move_rows(rows, [1, 1], [1, 1])

    for rank, got in enumerate(run(body, 2)):
        want = torch.tensor([[1.0], [11.0]]) + rank
        expect_close(got, want, what="the rows", rank=rank)


def test_experts_of_two(impl, run):
    """Each of two ranks has one expert: y is the one that the router chose."""
    torch.manual_seed(0)
    up, down, x = torch.randn(2, 3, 4), torch.randn(2, 4, 3), torch.randn(5, 3)

    def body(ctx):
        torch.manual_seed(1)
        layer = impl.ExpertParallel(impl.Router(3, 2), up, down)
        y, routing = layer(x)
        return y.detach(), routing.experts_NK, routing.weights_NK.detach()

    for rank, (y, experts, weights) in enumerate(run(body, 2)):
        each = [
            torch.nn.functional.gelu(token @ up[j]) @ down[j]
            for token, j in zip(x, experts.flatten().tolist(), strict=True)
        ]
        expect_close(y, weights * torch.stack(each), what="y", rank=rank)
