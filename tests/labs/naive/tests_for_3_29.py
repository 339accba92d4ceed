"""Naive: values on two ranks alone."""

import torch

from distlab.grading import expect_close, expect_equal


def test_sum_of_two(impl, run):
    """The sum of two ranks' tensors."""

    def body(ctx):
        tensor = torch.arange(4.0) + ctx.rank
        impl.all_reduce(tensor)
        return tensor

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, 2 * torch.arange(4.0) + 1, what="the sum", rank=rank)


def test_costs_of_two(impl, run):
    """The path and the choice of two ranks, where a message costs 1 s."""

    def body(ctx):
        links = {name: impl.Link(1.0, 0.0) for name in ("tree", "halving_doubling", "ring")}
        links["tree"] = impl.Link(0.5, 0.0)
        seconds = impl.predict("ring", 2, 8, links)
        return [*impl.critical_path("ring", 2, 8), seconds, impl.choose(2, 8, links)]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [2, 8.0, 2.0, "tree"], what="path, seconds, choice", rank=rank)
