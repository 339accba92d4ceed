"""Naive: values on two ranks alone."""

import torch
from torch import nn

from distlab.grading import expect_close, expect_equal


def test_norm_is_cut(impl, run):
    """A norm of 5 becomes 1."""

    def body(ctx):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        norm = impl.clip_by_global_norm([parameter], 1.0)
        return norm, [round(g, 5) for g in parameter.grad.tolist()]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(list(got), [5.0, [0.6, 0.8]], what="norm and gradient", rank=rank)


def test_one_step_of_two(impl, run):
    """The step of two ranks is that of one process on both micro-batches."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    alone = nn.Linear(3, 2)
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    nn.functional.cross_entropy(alone(inputs), targets).backward()
    optimizer.step()

    def body(ctx):
        model = nn.Linear(3, 2)
        model.load_state_dict(start)
        mine = slice(2 * ctx.rank, 2 * ctx.rank + 2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        impl.train_window(model, sgd, [(inputs[mine], targets[mine])])
        return model.weight.detach()

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, alone.weight, what="the weight", rank=rank)
