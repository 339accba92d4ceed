"""Naive: values on two ranks alone."""

import torch
from torch import nn

from distlab.grading import expect_close, expect_equal


def test_coordinates_of_four(impl, run):
    """Two axes of two ranks each."""

    def body(ctx):
        grid = impl.Grid({"data": 2, "tensor": 2})
        return [grid.coordinates(rank) for rank in range(4)]

    want = [{"data": d, "tensor": t} for d in (0, 1) for t in (0, 1)]
    expect_equal(run(body, 1)[0], want, what="the coordinates")


def test_mean_of_two(impl, run):
    """Two ranks have the mean of their gradients, and the norm of the model."""

    def body(ctx):
        grid = impl.Grid({"data": 2}, batch=("data",))
        mesh = impl.Mesh(grid, {"weight": impl.Spec(shape=(3,))})
        weight = nn.Parameter(torch.zeros(3))
        weight.grad = torch.full((3,), 1.0 + ctx.rank)
        mesh.reduce_gradients({"weight": weight})
        norm = mesh.clip({"weight": weight}, 100.0)
        return weight.grad, norm

    for rank, (grad, norm) in enumerate(run(body, 2)):
        expect_close(grad, torch.full((3,), 1.5), what="the gradient", rank=rank)
        expect_close(torch.tensor(norm), torch.tensor(6.75).sqrt(), what="the norm", rank=rank)
