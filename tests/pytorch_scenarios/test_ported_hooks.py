"""PyTorch's scenarios of communication hooks."""

# no postponed annotations: torch compares those of a hook with its types

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext
from solutions.phase3_multi_node.comm_hooks import all_reduce, bf16_compress, fp16_compress
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase4_production.powersgd import PowerSGD
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

SCENARIOS = Scenarios()
Wrapped = tuple[DDP, DistributedDataParallel]


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


def both(make: Callable[[], nn.Module] = mlp) -> Wrapped:
    """One bucket for each parameter on both sides, at least as far as torch's limit allows it."""
    ours, theirs = twins(make)
    small = {"bucket_bytes": 64, "first_bucket_bytes": 64}
    return DDP(ours, **small), DistributedDataParallel(theirs, bucket_cap_mb=64 / 2**20)


def backward(ctx: RankContext, model: nn.Module, salt: int = 0) -> list[Tensor | None]:
    model.zero_grad()
    model(inputs(ctx, 4, 5, salt=salt)).square().mean().backward()
    return gradients(model)


def with_hooks(ctx: RankContext, ours: Any, theirs: Any) -> Pair:
    """The gradients of two backwards with a hook on each side, before and after new buckets."""
    one, other = both()
    one.register_comm_hook(ours)
    other.register_comm_hook(None, theirs)
    return [backward(ctx, one, k) for k in (0, 1)], [backward(ctx, other, k) for k in (0, 1)]


@SCENARIOS.ported
def test_the_default_as_a_hook(ctx: RankContext) -> Pair:
    """An all-reduce as the hook: as without a hook."""
    return with_hooks(ctx, all_reduce, default_hooks.allreduce_hook)


@SCENARIOS.about(2e-3)
def test_half_precision_on_the_wire(ctx: RankContext) -> Pair:
    """float16 on both sides; ours divides before it rounds, torch after it."""
    return with_hooks(ctx, fp16_compress, default_hooks.fp16_compress_hook)


@SCENARIOS.about(2e-2)
def test_bfloat16_on_the_wire(ctx: RankContext) -> Pair:
    """bfloat16 on both sides."""
    return with_hooks(ctx, bf16_compress, default_hooks.bf16_compress_hook)


@SCENARIOS.ported
def test_what_a_hook_leaves_is_the_gradient(ctx: RankContext) -> Pair:
    """A hook that reduces nothing, and puts numbers of its own there."""

    def fill(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().fill_(2.5))
        return done

    def mine(bucket: Any) -> None:
        bucket.buffer.fill_(2.5)

    return with_hooks(ctx, mine, fill)


@SCENARIOS.ported
def test_work_after_the_reduction(ctx: RankContext) -> Pair:
    """The handle works on what has arrived: here it doubles it."""

    class Doubled:
        def __init__(self, bucket: Any) -> None:
            self.bucket, self.work = bucket, all_reduce(bucket)

        def wait(self) -> None:
            self.work.wait()
            self.bucket.buffer.mul_(2)

    def doubled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = default_hooks.allreduce_hook(None, bucket)
        return future.then(lambda done: done.value() * 2)

    return with_hooks(ctx, Doubled, doubled)


@SCENARIOS.ported
def test_a_hook_that_does_nothing_and_a_sum_after_it(ctx: RankContext) -> Pair:
    """With no reduction the rank keeps its own gradient; torch's are not divided then."""
    ours, theirs = both()
    ours.register_comm_hook(lambda bucket: None)
    theirs.register_comm_hook(None, debugging_hooks.noop_hook)
    found = []
    for model, share in ((ours, 1.0), (theirs, 0.5)):
        own = [g * share for g in backward(ctx, model)]
        for g in own:
            dist.all_reduce(g)
        found.append(own)
    return found[0], found[1]


@SCENARIOS.ported
def test_the_last_bucket_is_known(ctx: RankContext) -> Pair:
    """Hooks are called in the order of the buckets, and the last one can be told."""
    seen: dict[str, list[bool]] = {"ours": [], "theirs": []}
    ours, theirs = both()

    def mine(bucket: Any) -> Any:
        seen["ours"].append(bucket.index == len(ours.buckets) - 1)
        return all_reduce(bucket)

    def torchs(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen["theirs"].append(bucket.is_last())
        return default_hooks.allreduce_hook(None, bucket)

    ours.register_comm_hook(mine)
    theirs.register_comm_hook(None, torchs)
    backward(ctx, ours)
    backward(ctx, theirs)
    return tuple([flags[-1], any(flags[:-1])] for flags in seen.values())


@SCENARIOS.ported
def test_accumulation_with_a_hook(ctx: RankContext) -> Pair:
    """The hook sees the sum of what no_sync has accumulated."""

    def step(model: nn.Module) -> list[Tensor | None]:
        with model.no_sync():
            model(inputs(ctx, 2, 5)).sum().backward()
        model(inputs(ctx, 2, 5, salt=1)).sum().backward()
        return gradients(model)

    ours, theirs = both()
    ours.register_comm_hook(all_reduce)
    theirs.register_comm_hook(None, default_hooks.allreduce_hook)
    return step(ours), step(theirs)


@SCENARIOS.ported
def test_what_is_no_hook_is_refused(ctx: RankContext) -> Pair:
    """A number can't be called."""
    ours, theirs = both()
    return refused(lambda: ours.register_comm_hook(1)), refused(
        lambda: theirs.register_comm_hook(None, 1)
    )


def tall() -> nn.Module:
    """Matrices that rank 2 is worth it for; four samples give gradients of rank 4 at most."""
    return nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 24, bias=False))


def power(model: Wrapped, rank: int) -> tuple[PowerSGD, powerSGD_hook.PowerSGDState]:
    ours, theirs = model
    mine = PowerSGD(ours.parameters(), rank)
    state = powerSGD_hook.PowerSGDState(
        None, rank, start_powerSGD_iter=2, min_compression_rate=1, orthogonalization_epsilon=0
    )
    ours.register_comm_hook(mine)
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return mine, state


def wide(ctx: RankContext, model: nn.Module, step: int) -> list[Tensor | None]:
    model.zero_grad()
    model(inputs(ctx, 2, 24, salt=step)).square().sum().backward()
    return gradients(model)


@SCENARIOS.about(1e-3)
def test_powersgd_is_exact_for_gradients_of_low_rank(ctx: RankContext) -> Pair:
    """Four samples in all and rank 4: nothing is lost, in any step."""
    models = DDP(twins(tall)[0]), DistributedDataParallel(twins(tall)[1])
    power(models, 4)
    return tuple([wide(ctx, model, step) for step in range(4)] for model in models)


@SCENARIOS.ported
def test_powersgd_goes_on_from_its_state(ctx: RankContext) -> Pair:
    """Saved and loaded in between: the same bits as without."""

    def ours(again: bool) -> list[Tensor]:
        model = DDP(twins(tall)[0])
        hook = PowerSGD(model.parameters(), 1)
        model.register_comm_hook(hook)
        for step in range(4):
            if again and step == 2:
                state, hook = hook.state_dict(), PowerSGD(model.parameters(), 1)
                hook.load_state_dict(state)
                model.register_comm_hook(hook)
            wide(ctx, model, step)
            torch.optim.SGD(model.parameters(), lr=0.01).step()
        return values(model)

    def theirs() -> bool:
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return loaded.matrix_approximation_rank == 1

    same = all(torch.equal(a, b) for a, b in zip(ours(True), ours(False), strict=True))
    return same, theirs()


@SCENARIOS.ported
def test_powersgd_refuses_a_rank_below_one(ctx: RankContext) -> Pair:
    """Both refuse settings that make no sense, before any step."""
    odd = functools.partial(powerSGD_hook.PowerSGDState, None, start_powerSGD_iter=1)
    return (
        refused(lambda: PowerSGD(mlp().parameters(), 0)),
        refused(lambda: odd(use_error_feedback=True)),
    )
