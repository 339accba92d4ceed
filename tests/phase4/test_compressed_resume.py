"""DDP with compressors and several buckets: resumed in new processes it is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import Tensor, nn

from distlab.ranks import RankContext, run_ranks
from given.bucket_hooks import Hook
from solutions.phase3_multi_node.comm_hooks import all_reduce
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase4_production.gradient_compression import RandomK, TopK
from solutions.phase4_production.powersgd import PowerSGD
from solutions.phase4_production.quantisation import Int8, OneBit

STEPS, RANKS, WIDTH = 5, 3, 8
HOOKS: dict[str, Callable[[nn.Module], Hook]] = {
    "all-reduce": lambda net: all_reduce,
    "Top-K": lambda net: TopK(net.parameters(), 0.1, 0.5),
    "random-K": lambda net: RandomK(net.parameters(), 0.1),
    "PowerSGD": lambda net: PowerSGD(net.parameters(), 1),
    "int8": lambda net: Int8(),
    "one bit": lambda net: OneBit(net.parameters()),
}


class Crossed(nn.Module):
    """Four layers of one size that are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for k in (2, 0, 3, 1):
            x = torch.tanh(self.layers[k](x))
        return x


def wrapped(name: str) -> tuple[DDP, Any]:
    """A new model in a new DDP with buckets of one layer at the most, and the hook of that name."""
    net = Crossed()
    ddp = DDP(net, bucket_bytes=4 * WIDTH * (WIDTH + 1), first_bucket_bytes=4 * WIDTH)
    hook = HOOKS[name](net)
    ddp.register_comm_hook(hook)
    return ddp, hook


def train(ddp: DDP, rank: int, steps: Sequence[int]) -> list[Tensor]:
    """Plain SGD with learning rate 0.1; the weights after each step, copies."""
    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(2, 6, WIDTH, generator=generator)
        ddp.zero_grad()
        (ddp(x) - y).square().mean().backward()
        with torch.no_grad():
            for p in ddp.parameters():
                p.sub_(p.grad, alpha=0.1)
        found.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
    return found


def whole(ctx: RankContext, name: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The weights after each step, and the contents of a checkpoint after each."""
    torch.manual_seed(0)
    ddp, hook = wrapped(name)
    weights, states = [], []
    for step in range(STEPS):
        weights += train(ddp, ctx.rank, [step])
        model = {key: value.clone() for key, value in ddp.module.state_dict().items()}
        compressor = hook.state_dict() if hasattr(hook, "state_dict") else None
        states.append({"model": model, "hook": compressor, "order": ddp.bucket_order()})
    return weights, states


def resumed(ctx: RankContext, name: str, own: list[dict[str, Any]], done: int) -> list[Tensor]:
    """The weights after each later step of a run that goes on from the rank's ``own``."""
    torch.manual_seed(1)
    ddp, hook = wrapped(name)
    state = own[ctx.rank]
    ddp.module.load_state_dict(state["model"])
    ddp.set_bucket_order(state["order"])
    if state["hook"] is not None:
        hook.load_state_dict(state["hook"])
    return train(ddp, ctx.rank, range(done, STEPS))


@pytest.mark.parametrize("name", HOOKS)
def test_resumed_is_uninterrupted_to_the_bit(name: str) -> None:
    """After the first step, whose buckets are made anew, and after a later one."""
    start = partial(run_ranks, world_size=RANKS, ledger=False)
    uninterrupted = [*start(lambda ctx: whole(ctx, name))]
    for done in (1, 3):
        own = [states[done - 1] for _, states in uninterrupted]
        again = start(lambda ctx, own=own, done=done: resumed(ctx, name, own, done))
        for (want, _), got in zip(uninterrupted, again, strict=True):
            assert [torch.equal(*pair) for pair in zip(got, want[done:], strict=True)] == [True] * (
                STEPS - done
            )


def test_bucket_order() -> None:
    """Unknown before the first backward; then the buckets of a new wrapper are those of the old."""

    def buckets(ddp: DDP) -> list[list[int]]:
        indices = {p: k for k, p in enumerate(ddp.trainable)}
        return [[indices[p] for p in bucket.parameters] for bucket in ddp.buckets]

    def body(ctx: RankContext) -> list[Any]:
        (first, _), (second, _) = wrapped("all-reduce"), wrapped("all-reduce")
        before = first.bucket_order()
        second.set_bucket_order(before)
        guess = buckets(second)
        train(first, ctx.rank, [0])
        second.set_bucket_order(first.bucket_order())
        set_ = buckets(second)
        train(second, ctx.rank, [0])
        wrong = []
        for order in ([0, 1], [0] * 8):
            with pytest.raises(ValueError, match="8 are trained"):
                second.set_bucket_order(order)
            wrong.append(buckets(second))
        return [before, guess, buckets(first), set_, *wrong]

    for before, guess, *others in run_ranks(body, 2, ledger=False):
        assert before is None
        assert len(others[0]) > 2
        assert guess != others[0]
        assert all(each == others[0] for each in others)
