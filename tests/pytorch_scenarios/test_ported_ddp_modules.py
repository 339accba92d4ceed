"""PyTorch's scenarios of DistributedDataParallel: what is in the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.ranks import RankContext
from solutions.phase3_multi_node.ddp import DDP
from tests.pytorch_scenarios.beside import (
    Pair,
    Ran,
    Scenarios,
    gradients,
    inputs,
    mlp,
    refused,
    twins,
    values,
)
from tests.pytorch_scenarios.ddp_pairs import Outputs, after, both

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


class Normed(nn.Module):
    """BatchNorm, and a buffer of integers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.norm(x))


@SCENARIOS.ported
def test_buffers_begin_as_the_first_ranks(ctx: RankContext) -> Pair:
    """The running statistics of BatchNorm before and after each forward, and an integer buffer."""

    def train(model: nn.Module) -> list[Any]:
        model.module.calls += 10 * ctx.rank
        seen = []
        for step in range(3):
            model.zero_grad()
            model(inputs(ctx, 6, 4, salt=step)).square().sum().backward()
            seen.append([values(model), gradients(model)])
        return seen

    return after(Normed, train)


@SCENARIOS.ported
def test_starts_with_the_state_of_the_first_rank(ctx: RankContext) -> Pair:
    """Parameters and buffers that differ between the ranks before."""

    def make() -> nn.Module:
        module = Normed()
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data += ctx.rank
        return module

    ours, theirs = both(make)
    return values(ours), values(theirs)


@SCENARIOS.ported
def test_modules_that_differ_between_ranks(ctx: RankContext) -> Pair:
    """Another number of parameters: refused by both, on every rank."""

    def longer() -> nn.Module:
        return nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + ctx.rank)])

    return refused(lambda: DDP(longer())), refused(lambda: DistributedDataParallel(longer()))


@SCENARIOS.ported
def test_nothing_to_train(ctx: RankContext) -> Pair:
    """A module whose parameters are all frozen, or that has none."""
    odd = [lambda: nn.Linear(2, 2).requires_grad_(False), nn.ReLU]
    return tuple(
        [refused(lambda make=make: wrap(make())) for make in odd]
        for wrap in (DDP, DistributedDataParallel)
    )


@SCENARIOS.ported
def test_a_layer_without_elements(ctx: RankContext) -> Pair:
    """A linear layer with no output features."""

    def make() -> nn.Module:
        return Outputs(lambda a, b: a.sum() + b.sum())

    def empty() -> nn.Module:
        module = make()
        module.b = nn.Linear(3, 0)
        return module

    return after(empty, lambda m: m(inputs(ctx, 2, 3)).backward())


@SCENARIOS.newer
def test_complex_and_double_parameters(ctx: RankContext) -> Pair:
    """Parameters of three dtypes in one module; the gradients have theirs."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3))
            self.b = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.c = nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a * x * self.b).abs().sum() + (self.c * x).sum()

    return after(Mixed, lambda m: m(inputs(ctx, 3)).backward())


@SCENARIOS.ported
def test_several_wrapped_parts_in_one_module(ctx: RankContext) -> Pair:
    """Two parts have wrappers of their own; one backward goes through both."""

    def step(wrap: Callable[[nn.Module], nn.Module], module: nn.Module) -> list[Any]:
        a, b = wrap(module[0]), wrap(module[2])
        for k in range(2):
            module.zero_grad()
            b(F.relu(a(inputs(ctx, 2, 5, salt=k)))).sum().backward()
        return gradients(module)

    ours, theirs = twins(mlp)
    return step(DDP, ours), step(DistributedDataParallel, theirs)


@SCENARIOS.ported
def test_arguments_by_name(ctx: RankContext) -> Pair:
    """Inputs that are passed by name."""

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
            return self.layer(x) * scale + (0 if shift is None else shift)

    x = inputs(ctx, 2, 3)
    return after(ByName, lambda m: m(x=x, scale=3.0, shift=x).square().sum().backward())


@SCENARIOS.ported
def test_only_the_ranks_of_a_group(ctx: RankContext) -> Pair:
    """A group of one rank each: gradients stay the rank's own."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    ours, theirs = twins(mlp)
    own = groups[ctx.rank]
    found = []
    for model in (DDP(ours, group=own), DistributedDataParallel(theirs, process_group=own)):
        model(inputs(ctx, 2, 5)).sum().backward()
        found.append(gradients(model))
    return found[0], found[1]


@SCENARIOS.ported
def test_hooks_of_the_user_on_modules(ctx: RankContext) -> Pair:
    """A forward hook changes the result, a backward hook the gradient."""

    def step(model: nn.Module) -> None:
        inner = model.module
        inner[0].register_forward_hook(lambda _, __, out: out * 2)
        inner[2].register_full_backward_hook(lambda _, gin, __: (gin[0] * 3,))
        model(inputs(ctx, 2, 5)).sum().backward()

    return after(mlp, step)


class Checkpointed(nn.Module):
    """Two recomputed layers, which may share their weight."""

    def __init__(self, shared: bool, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant
        if shared:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@SCENARIOS.ported
def test_recomputed_layers(ctx: RankContext) -> Pair:
    """Recomputation without reentrance, twice, with an own and with a shared weight."""
    pairs = [
        after(
            lambda shared=shared: Checkpointed(shared, False),
            lambda m: m(inputs(ctx, 2, 4).requires_grad_()).sum().backward(),
        )
        for shared in (False, True)
    ]
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


@SCENARIOS.ported
def test_a_reentrant_checkpoint(ctx: RankContext) -> Pair:
    """One reentrant segment in each backward works in both."""

    class Once(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True))

    return after(
        lambda: Once(False, True), lambda m: m(inputs(ctx, 2, 4).requires_grad_()).sum().backward()
    )


@SCENARIOS.ported
def test_two_reentrant_checkpoints_share_a_weight(ctx: RankContext) -> Pair:
    """The weight's gradient is complete twice in one backward: both refuse."""
    ours, theirs = twins(lambda: Checkpointed(True, True))
    x = inputs(ctx, 2, 4).requires_grad_()
    models = DDP(ours), DistributedDataParallel(theirs, find_unused_parameters=True)
    return tuple(refused(lambda m=m: m(x).sum().backward()) for m in models)


@SCENARIOS.ported
def test_a_state_dict_goes_on_in_a_new_wrapper(ctx: RankContext) -> Pair:
    """The same names as torch's, and the next step from it is the same."""

    def step(model: nn.Module) -> list[Any]:
        model(inputs(ctx, 2, 5)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(state)
        model.zero_grad()
        model(inputs(ctx, 2, 5, salt=1)).sum().backward()
        return [state]

    return after(mlp, step)


@SCENARIOS.ported
def test_another_modules_values_for_one_call(ctx: RankContext) -> Pair:
    """torch.func.functional_call with other parameters gives their result."""

    def step(model: nn.Module) -> Tensor:
        other = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, other, (torch.ones(2, 5),))

    return after(mlp, step)
