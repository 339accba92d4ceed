"""PyTorch's scenarios of fully sharded data parallelism: what modules and loops do."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.distributed.fsdp imports it: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distlab.ranks import RankContext
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, inputs, mlp
from tests.pytorch_scenarios.fsdp_pairs import both, layers, none, plain_step, trained

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(3)


@SCENARIOS.newer
def test_one_group_of_uneven_parameters(ctx: RankContext) -> Pair:
    """Sizes that three ranks don't divide, all in the root."""
    return trained(both(mlp, none), partial(plain_step, ctx))


@SCENARIOS.newer
def test_several_groups(ctx: RankContext) -> Pair:
    """Each layer is gathered on its own."""
    return trained(both(mlp), partial(plain_step, ctx))


@SCENARIOS.newer
def test_ranks_without_any_element(ctx: RankContext) -> Pair:
    """Two numbers for three ranks: a shard is empty."""

    def tiny() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 1, bias=False), nn.Linear(1, 2, bias=False))

    return trained(both(tiny), partial(plain_step, ctx))


class Again(nn.Module):
    """One layer several times, a frozen one between, also without autograd."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.still, self.last = (nn.Linear(5, 5) for _ in range(3))
        self.still.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.still(F.relu(self.last(x)))
            with torch.no_grad():
                y = F.relu(self.last(x))
            x = x + y
        return x


@SCENARIOS.newer
def test_units_that_run_several_times(ctx: RankContext) -> Pair:
    """Trainable and frozen, with and without autograd in one forward."""
    pairs = [trained(both(lambda f=f: Again(f)), partial(plain_step, ctx)) for f in (False, True)]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


class Blocks(nn.Module):
    """Blocks that are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@SCENARIOS.newer
def test_recomputed_units(ctx: RankContext) -> Pair:
    """Each unit is recomputed in backward."""
    return trained(both(Blocks, lambda m: list(m.blocks)), partial(plain_step, ctx))


class Tied(nn.Module):
    """The first and the last layer are one weight, in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


@SCENARIOS.newer
def test_a_shared_weight_in_the_root(ctx: RankContext) -> Pair:
    """Its gradient is the sum of both uses'; the state names it twice."""
    return trained(both(Tied, lambda m: [m.middle]), partial(plain_step, ctx))


@SCENARIOS.newer
def test_gradients_add_up_over_backwards(ctx: RankContext) -> Pair:
    """Three micro-batches, one step: every backward adds its mean."""

    def step(model: nn.Module, k: int) -> None:
        for part in range(3):
            plain_step(ctx, model, 10 * k + part)

    return trained(both(mlp), step)


@SCENARIOS.newer
def test_forwards_first_then_backwards(ctx: RankContext) -> Pair:
    """Two forwards are open when the backwards come, in their order."""

    def step(model: nn.Module, k: int) -> None:
        losses = [model(inputs(ctx, 2, 5, salt=10 * k + i)).square().sum() for i in range(2)]
        for loss in losses:
            loss.backward()

    return trained(both(mlp), step)


@SCENARIOS.newer
def test_one_backward_through_two_forwards(ctx: RankContext) -> Pair:
    """The loss is the sum of two calls' results."""

    def step(model: nn.Module, k: int) -> None:
        first, second = (model(inputs(ctx, 2, 5, salt=10 * k + i)) for i in range(2))
        (first.sum() + second.square().sum()).backward()

    return trained(both(mlp), step)


@SCENARIOS.newer
def test_only_biases_train(ctx: RankContext) -> Pair:
    """Frozen and trainable parameters in one group."""

    def make() -> nn.Module:
        module = mlp()
        for layer in layers(module):
            layer.weight.requires_grad_(False)
        return module

    return trained(both(make), partial(plain_step, ctx))


@SCENARIOS.newer
def test_whole_groups_are_frozen(ctx: RankContext) -> Pair:
    """Every other layer is frozen, the first one too."""

    def make() -> nn.Module:
        module = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)])
        module[0].requires_grad_(False)
        module[2].requires_grad_(False)
        return module

    return trained(both(make), partial(plain_step, ctx))


class Spare(nn.Module):
    """A layer that nobody calls, and a result that the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.spare = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@SCENARIOS.newer
def test_unused_layers_and_results(ctx: RankContext) -> Pair:
    """They have no gradient, and momentum leaves them alone."""

    def step(model: nn.Module, k: int) -> None:
        model(inputs(ctx, 2, 5, salt=k))[k % 2].square().sum().backward()

    return trained(both(Spare), step)


Named = namedtuple("Named", ["a", "b"])


@SCENARIOS.newer
def test_results_in_containers(ctx: RankContext) -> Pair:
    """Named tuples, dicts and lists, nested."""

    class Containers(Spare):
        def forward(self, x: Tensor) -> Any:
            return Named({"x": [self.a(x)]}, (self.b(x), "text", 3))

    def step(model: nn.Module, k: int) -> list[Any]:
        out = model(inputs(ctx, 2, 5, salt=k))
        (out.a["x"][0].sum() + out.b[0].square().sum()).backward()
        return [type(out).__name__, out.b[1:]]

    return trained(both(Containers), step)


@SCENARIOS.newer
def test_a_module_without_inputs(ctx: RankContext) -> Pair:
    """The forward of the root takes nothing."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    def step(model: nn.Module, k: int) -> Tensor:
        out = model()
        out.square().sum().backward()
        return out

    return trained(both(Alone, none), step)
