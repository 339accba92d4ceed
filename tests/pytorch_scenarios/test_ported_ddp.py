"""PyTorch's scenarios of DistributedDataParallel: what training loops and forwards do."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.ranks import RankContext
from tests.pytorch_scenarios.beside import (
    Pair,
    Ran,
    Scenarios,
    gradients,
    inputs,
    mlp,
    values,
)
from tests.pytorch_scenarios.ddp_pairs import UNUSED, Outputs, after

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


@SCENARIOS.ported
def test_training(ctx: RankContext) -> Pair:
    """Five steps of momentum, each rank with samples of its own."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
            optimizer.step()
        return values(model)

    return after(mlp, train)


@SCENARIOS.ported
def test_gradients_are_views_of_buckets(ctx: RankContext) -> Pair:
    """A gradient has a base that is larger than itself, and zero_grad may keep it."""

    def views(model: nn.Module) -> list[bool]:
        for step in range(2):
            model.zero_grad(set_to_none=False)
            model(inputs(ctx, 4, 5, salt=step)).sum().backward()
        return [p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in model.parameters()]

    return after(mlp, views, gradient_as_bucket_view=True)


@SCENARIOS.ported
def test_accumulation_without_sync(ctx: RankContext) -> Pair:
    """Two backwards in no_sync leave the rank's own gradients, the third sends the sum of three."""

    def accumulate(model: nn.Module) -> list[Any]:
        seen = []
        with model.no_sync():
            for step in range(2):
                model(inputs(ctx, 4, 5, salt=step)).sum().backward()
                seen.append(gradients(model))
        model(inputs(ctx, 4, 5, salt=2)).sum().backward()
        return seen

    return after(mlp, accumulate)


@SCENARIOS.ported
def test_backward_twice_adds_two_means(ctx: RankContext) -> Pair:
    """Without no_sync both backwards send, and the gradient is the sum of two means."""

    def twice(model: nn.Module) -> None:
        for step in range(2):
            model(inputs(ctx, 4, 5, salt=step)).sum().backward()

    return after(mlp, twice)


class Branches(nn.Module):
    """Three layers, of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for k in used:
            x = self.layers[k](x)
        return x


@SCENARIOS.ported
def test_parameters_unused_here_and_everywhere(ctx: RankContext) -> Pair:
    """Unused on one rank: the mean with zero. Unused on all ranks: None."""
    return after(Branches, lambda m: m(inputs(ctx, 2, 3), [0, ctx.rank]).sum().backward(), **UNUSED)


@SCENARIOS.ported
def test_control_flow_that_changes_by_step_and_rank(ctx: RankContext) -> Pair:
    """Another branch in each step, on each rank another one."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            used = [step % 3, (step + ctx.rank) % 3]
            model(inputs(ctx, 2, 3, salt=step), used).sum().backward()
            optimizer.step()
        return values(model)

    return after(Branches, train, **UNUSED)


@SCENARIOS.ported
def test_all_parameters_used_although_unused_are_looked_for(ctx: RankContext) -> Pair:
    """The search for unused parameters finds none."""
    return after(mlp, lambda m: m(inputs(ctx, 2, 5)).sum().backward(), **UNUSED)


class Undefined(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> None:
        return None


class HalfUndefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), Undefined.apply(self.b(x))


@SCENARIOS.ported
def test_undefined_gradients(ctx: RankContext) -> Pair:
    """A function returns None for its gradient: its parameters have none."""

    def step(model: nn.Module) -> None:
        a, b = model(inputs(ctx, 2, 3))
        (a.sum() + b.sum()).backward()

    return after(HalfUndefined, step, **UNUSED)


Named = namedtuple("Named", ["a", "b"])


@dataclass
class Data:
    a: Tensor
    b: Tensor


@SCENARIOS.ported
def test_an_output_that_the_loss_leaves_out(ctx: RankContext) -> Pair:
    """In a tuple and in a dict; the layer behind it has no gradient on any rank."""
    x = inputs(ctx, 2, 3)
    tuples = after(
        lambda: Outputs(lambda a, b: (a, b)), lambda m: m(x)[0].sum().backward(), **UNUSED
    )
    dicts = after(
        lambda: Outputs(lambda a, b: {"a": a, "b": b}),
        lambda m: m(x)["b"].sum().backward(),
        **UNUSED,
    )
    return [tuples[0], dicts[0]], [tuples[1], dicts[1]]


@SCENARIOS.ported
def test_named_tuples_and_data_classes_as_outputs(ctx: RankContext) -> Pair:
    """They come out as they are, and both layers have gradients."""

    def step(model: nn.Module) -> str:
        out = model(inputs(ctx, 2, 3))
        (out.a.sum() + out.b.sum()).backward()
        return type(out).__name__

    pairs = [after(lambda kind=kind: Outputs(kind), step, **UNUSED) for kind in (Named, Data)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


@SCENARIOS.ported
def test_outputs_that_nobody_goes_back_through(ctx: RankContext) -> Pair:
    """Forwards without a backward, then an ordinary step."""

    def step(model: nn.Module) -> None:
        for _ in range(3):
            model(inputs(ctx, 2, 5))
        model(inputs(ctx, 2, 5, salt=1)).sum().backward()

    return after(mlp, step)


@SCENARIOS.ported
def test_two_forwards_then_one_backward(ctx: RankContext) -> Pair:
    """The loss is the sum of two calls' results."""

    def step(model: nn.Module) -> None:
        first, second = (model(inputs(ctx, 2, 5, salt=k)) for k in (0, 1))
        (first.sum() + second.square().sum()).backward()

    return after(mlp, step)


@SCENARIOS.ported
def test_inference_without_autograd(ctx: RankContext) -> Pair:
    """In eval mode, under no_grad and with inference_mode; on one rank more often."""

    def step(model: nn.Module) -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            out = [model(inputs(ctx, 2, 5, salt=k)) for k in range(1 + ctx.rank)]
        with torch.inference_mode():
            return [*out, model(inputs(ctx, 2, 5, salt=9)).clone()]

    return after(mlp, step)


class Detached(nn.Module):
    """One result has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            still = self.a(x)
        return self.b(self.a(x)), still, torch.zeros(2, requires_grad=True) * 2


@SCENARIOS.ported
def test_results_without_gradient_and_new_tensors(ctx: RankContext) -> Pair:
    """A forward that computes a part under no_grad and makes tensors of its own."""

    def step(model: nn.Module) -> bool:
        out, still, fresh = model(inputs(ctx, 2, 3))
        (out.sum() + fresh.sum()).backward()
        return still.requires_grad

    return after(Detached, step)
