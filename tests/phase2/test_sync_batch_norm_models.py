"""Checks of exercise 2.28: converted models, and inputs that are refused."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase2.batch_norms import given_to
from tests.phase2.parallel_values import values


class Net(nn.Module):
    """Batch norms of all kinds: nested, in two places, frozen, in eval mode, without parameters."""

    def __init__(self, impl=None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)
        self.again = self.norm
        self.inner = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4, momentum=None), nn.ReLU())
        self.still = nn.BatchNorm1d(4).eval().requires_grad_(False)
        self.bare = nn.BatchNorm3d(4, affine=False, track_running_stats=False)
        self.theirs = nn.SyncBatchNorm(4)
        self.group_norm, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)
        self.ours = impl.SyncBatchNorm(4) if impl else nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.again(self.norm(self.conv(x)).tanh())
        x = self.bare(x.unsqueeze(2)).flatten(2)
        return self.instance(self.group_norm(self.ours(self.still(self.inner(x)))))


OLD = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
NORMS = ("norm", "again", "inner.1", "still", "bare", "theirs")
SETTINGS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")


def net_of(seed: int, impl=None) -> Net:
    """A net with weights that every rank draws alike."""
    return given_to(Net(impl).double(), seed)


@exercise("2.28", "virtual", asserts="converted same-tensors settings places others itself none")
def test_converted_layers(impl, run, seed):
    """Same tensors, settings and modes, shared layers stay shared, other layers stay."""

    def body(ctx):
        net = net_of(seed, impl)
        before = dict(net.named_modules(remove_duplicate=False))
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        names = list(net.state_dict())
        with ctx.region("convert"):
            came = impl.convert_batch_norms(net)
            twice = [m for m in came.modules() if type(m) in OLD]
            first = came.norm
            impl.convert_batch_norms(came)
        after = dict(came.named_modules(remove_duplicate=False))
        now = {**dict(came.named_parameters()), **dict(came.named_buffers())}
        facts = {
            "the model itself comes back": came is net,
            "a second conversion changes nothing": came.norm is first and not twice,
            "a layer in two places is one layer": came.norm is came.again,
            "the state_dict has the same names": list(came.state_dict()) == names,
            "parameters and buffers are the same tensors": tensors.keys() == now.keys()
            and all(now[name] is each for name, each in tensors.items()),
            "the other layers stay": all(
                after[n] is m for n, m in before.items() if n not in NORMS
            ),
        }
        for name in NORMS:
            new, old = after[name], before[name]
            facts[f"{name} is a SyncBatchNorm"] = type(new) is impl.SyncBatchNorm
            same = all(getattr(new, each) == getattr(old, each) for each in SETTINGS)
            facts[f"{name} has the old settings and mode"] = same
        alone = nn.BatchNorm2d(3)
        new, other = impl.convert_batch_norms(alone), nn.Linear(2, 2)
        facts["a batch norm alone becomes a layer with its weight"] = (
            type(new) is impl.SyncBatchNorm and new.weight is alone.weight
        )
        facts["a layer that is none comes back"] = impl.convert_batch_norms(other) is other
        return facts

    results = run(body, 2)
    for rank, facts in enumerate(results):
        for what, holds in facts.items():
            if not holds:
                fail(f"it should hold, and does not: {what}", cause="converted", rank=rank)
        sent = [str(event) for event in results.logs[rank].select(region="convert").events]
        expect_equal(sent, [], what="messages of a conversion", rank=rank, cause="sent")


@exercise("2.28", "virtual gloo", asserts="converted same gradients tracked")
def test_converted_model_trains_like_one_process(impl, run, seed):
    """Three steps of an optimizer that was made before: weights and statistics of one process."""
    rows = (1, 4, 2)

    def batch(rank, step):
        return values(seed, 300 + 10 * step + rank, rows[rank], 2, 4, 3)

    def steps(net, optimizer, batches, summed):
        for batch in batches:
            optimizer.zero_grad()
            net(batch).sin().sum().backward()
            summed([p.grad for p in net.parameters() if p.grad is not None])
            optimizer.step()
        return {name: t.clone() for name, t in net.state_dict().items()}

    def body(ctx):
        def add_up(grads):
            for grad in grads:
                torch.distributed.all_reduce(grad)

        net = net_of(seed)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        impl.convert_batch_norms(net)
        return steps(net, optimizer, [batch(ctx.rank, step) for step in range(3)], add_up)

    net = net_of(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    whole = [torch.cat([batch(rank, step) for rank in range(3)]) for step in range(3)]
    want = steps(net, optimizer, whole, lambda grads: None)
    for rank, found in enumerate(run(body, 3)):
        for name, right in want.items():
            expect_close(found[name], right, what=name, rank=rank, rtol=1e-8, atol=1e-9)


@exercise("2.28", "virtual", asserts="refusals life")
def test_bad_inputs_are_refused(impl, run, seed):
    """Too few dimensions, other channels, whole numbers: ValueError, and nothing is sent."""
    calls = ["one dimension", "other channels", "channels last in shape", "whole numbers"]
    calls += ["other channels in eval"]

    def bad(layer):
        inputs = [torch.ones(4), torch.ones(4, 3), torch.ones(2, 3, 4), torch.ones(2, 4).long()]
        found = [refusal(layer, x) for x in inputs]
        return [*found, refusal(layer.eval(), torch.ones(4, 3))]

    def body(ctx):
        return bad(impl.SyncBatchNorm(4))

    def goes_on(ctx):
        layer = impl.SyncBatchNorm(4)
        bad(layer)
        return layer.train()(torch.arange(8.0).view(2, 4)), layer.num_batches_tracked

    expect_refused(run(body, 2), calls)
    for rank, (y, batches) in enumerate(run(goes_on, 2)):
        want = torch.tensor([[-1.0] * 4, [1.0] * 4])
        expect_close(y, want, what="the output after refusals", rank=rank, rtol=1e-4, atol=1e-4)
        expect_equal(int(batches), 1, what="batches that were tracked", rank=rank)


@trace("2.28")
def trace_batch_norms(impl):
    """Three steps of a small convolutional net with two batch norms over the ranks."""

    def body(ctx):
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
        )
        net = impl.convert_batch_norms(net)
        x = values(0, ctx.rank, 8, 3, 16, 16).float()
        for step in ctx.steps(4):
            with ctx.region(f"step {step}"):
                net(x).square().mean().backward()

    return body
