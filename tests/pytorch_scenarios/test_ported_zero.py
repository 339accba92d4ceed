"""PyTorch's scenarios of ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext
from solutions.phase3_multi_node.zero import ZeroOptimizer
from solutions.phase3_multi_node.zero_gradients import Zero2Optimizer
from tests.pytorch_scenarios.beside import (
    Pair,
    Ran,
    Scenarios,
    inputs,
    mlp,
    refused,
    twins,
    values,
)
from tests.pytorch_scenarios.zero_pairs import BOTH, Make, average, of_both, train, whole_state

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


@SCENARIOS.ported
def test_optimizers_of_every_kind(ctx: RankContext) -> Pair:
    """SGD, Adam and AdamW, also upwards; after half of the steps a parameter is frozen and back."""
    kinds: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"maximize": True}),
    ]

    def work(make: Make, model: nn.Module) -> list[Any]:
        seen = []
        for kind, options in kinds:
            optimizer = make(model.parameters(), kind, lr=0.01, **options)
            train(ctx, model, optimizer, 3)
            for still in (True, False):
                model[0].weight.requires_grad = not still
                train(ctx, model, optimizer, 1)
            seen.append(values(model))
        return seen

    return of_both(work)


@SCENARIOS.ported
def test_a_schedule_of_the_learning_rate(ctx: RankContext) -> Pair:
    """A scheduler of torch changes the rate in each step."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(4):
            train(ctx, model, optimizer, 1)
            schedule.step()
        return [values(model), optimizer.param_groups[0]["lr"]]

    return of_both(work)


@SCENARIOS.ported
def test_a_state_dict_brings_rate_and_momentum_back(ctx: RankContext) -> Pair:
    """A new optimizer with another rate goes on as the one that was saved."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        train(ctx, model, optimizer, 2)
        state = whole_state(optimizer)
        again = make(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.0)
        again.load_state_dict(state)
        train(ctx, model, again, 2)
        rate = [again.param_groups[0][key] for key in ("lr", "momentum", "nesterov")]
        return [sorted(state), len(state["state"]), rate, values(model)]

    return of_both(work)


@SCENARIOS.ported
def test_states_of_a_plain_optimizer_and_back(ctx: RankContext) -> Pair:
    """A plain optimizer's state goes into the sharded one, and the sharded one's into a plain."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        plain = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(ctx, model, plain, 2)
        sharded = make(model.parameters(), torch.optim.AdamW, lr=0.01)
        sharded.load_state_dict(plain.state_dict())
        train(ctx, model, sharded, 2)
        back = torch.optim.AdamW(model.parameters(), lr=0.01)
        back.load_state_dict(whole_state(sharded))
        train(ctx, model, back, 2)
        return values(model)

    return of_both(work)


class Extra(torch.optim.SGD):
    """Takes one more argument, and writes one more option."""

    def step(self, closure: Any = None, seen: list[int] | None = None) -> Any:
        loss = super().step()
        if seen is not None:
            seen.append(5)
        self.param_groups[0]["written"] = 0.5
        return loss


class NoClosure(torch.optim.SGD):
    """Its step takes nothing."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


@SCENARIOS.ported
def test_more_arguments_and_options_of_the_inner_optimizer(ctx: RankContext) -> Pair:
    """An argument goes through ``step``; an option that the inner one writes comes out."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        optimizer = make(model.parameters(), Extra, lr=0.1)
        seen: list[int] = []
        train(ctx, model, optimizer, 1)
        optimizer.step(seen=seen)
        plain = make(model.parameters(), NoClosure, lr=0.1)
        train(ctx, model, plain, 1)
        return [seen, optimizer.param_groups[0]["written"], values(model)]

    return of_both(work)


@SCENARIOS.ported
def test_a_closure(ctx: RankContext) -> Pair:
    """It is called once, its loss comes back, and its gradients are stepped."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        calls: list[int] = []

        def closure() -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(inputs(ctx, 4, 5)).square().mean()
            loss.backward()
            average(model)
            return loss

        return [optimizer.step(closure), len(calls), values(model)]

    return of_both(work)


@SCENARIOS.ported
def test_gradients_are_cleared(ctx: RankContext) -> Pair:
    """``zero_grad`` leaves None."""

    def work(make: Make, model: nn.Module) -> list[bool]:
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1)
        model(inputs(ctx, 4, 5)).sum().backward()
        before = [p.grad is None for p in model.parameters()]
        optimizer.zero_grad()
        return [*before, *(p.grad is None for p in model.parameters())]

    return of_both(work)


@SCENARIOS.ported
def test_what_can_be_given_as_parameters(ctx: RankContext) -> Pair:
    """Nothing, a tensor, a number, and a list with a number in it are refused; groups are not."""

    def work(make: Make, model: nn.Module) -> list[bool]:
        layers = model[0], model[2]
        given: list[Any] = [
            [],
            torch.randn(1),
            1.2,
            [*model.parameters(), 42],
            [{"params": [m.weight for m in layers]}, {"params": [m.bias for m in layers]}],
            list(model.parameters()),
            model.parameters(),
        ]
        return [refused(lambda p=p: make(p, torch.optim.SGD, lr=0.1)) for p in given]

    return of_both(work)


@SCENARIOS.ported
def test_groups_at_once_or_one_later(ctx: RankContext) -> Pair:
    """Two groups with decays of their own, given together, or the second one after two steps."""

    def work(make: Make, model: nn.Module) -> list[Any]:
        weights = {"params": [model[0].weight, model[2].weight], "weight_decay": 0.0}
        biases = {"params": [model[0].bias, model[2].bias], "weight_decay": 0.1}
        together = make([weights, biases], torch.optim.AdamW, lr=0.01)
        train(ctx, model, together, 2)
        later = make(weights["params"], torch.optim.AdamW, lr=0.01, weight_decay=0.0)
        train(ctx, model, later, 2)
        later.add_param_group(biases)
        train(ctx, model, later, 2)
        return [values(model), len(together.param_groups), len(later.param_groups)]

    return of_both(work)


@SCENARIOS.ported
def test_a_first_parameter_that_is_frozen(ctx: RankContext) -> Pair:
    """A large frozen parameter in front, and a group that is added; both leave it alone."""

    def work(make: Make, model: nn.Module) -> list[Tensor]:
        model[0].weight.requires_grad = False
        optimizer = make([model[0].weight, model[0].bias], torch.optim.SGD, lr=0.1)
        optimizer.add_param_group({"params": [*model[2].parameters()]})
        train(ctx, model, optimizer, 2)
        return values(model)

    return of_both(work)


@SCENARIOS.ported
def test_shards_are_of_equal_size(ctx: RankContext) -> Pair:
    """Elements in the state: half of them on each rank, for sizes that divide in both ways."""
    sizes = [9, 7, 5, 3] * 2

    def elements(optimizer: torch.optim.Optimizer) -> int:
        return sum(s["momentum_buffer"].numel() for s in optimizer.state.values())

    found = []
    for make in BOTH:
        params = [nn.Parameter(torch.ones(n, 1)) for n in sizes]
        optimizer = make(params, torch.optim.SGD, lr=0.1, momentum=0.9)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        inner = optimizer if make is ZeroOptimizer else optimizer.optim
        found.append(elements(inner))
    return found[0], found[1]


@SCENARIOS.ported
def test_a_group_of_ranks(ctx: RankContext) -> Pair:
    """Each rank is a group of its own and trains alone."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    found = []
    for name, make, model in zip(("group", "process_group"), BOTH, twins(mlp), strict=True):
        options = {name: groups[ctx.rank]}
        optimizer = make(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(ctx, 4, 5, salt=step)).sum().backward()
            optimizer.step()
        found.append(values(model))
    return found[0], found[1]


@SCENARIOS.ported
def test_reduction_and_step_in_one(ctx: RankContext) -> Pair:
    """ZeRO-2's backward and step, beside torch's data parallelism with a plain optimizer."""
    ours, theirs = twins(mlp)
    sharded = Zero2Optimizer(ours.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model = DistributedDataParallel(theirs)
    whole = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for net, optimizer in ((ours, sharded), (model, whole)):
        for step in range(4):
            optimizer.zero_grad()
            net(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
            optimizer.step()
    return values(ours), values(theirs)
