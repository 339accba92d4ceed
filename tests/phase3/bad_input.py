"""Bad input that several files of the phase must refuse: no member of the group, other models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from distlab.grading import expect_refusals, fail, refusal
from distlab.ranks import RankContext


def check_non_members(run: Any, calls: dict[str, Callable[[Any], object]]) -> None:
    """Each of ``calls`` raises ValueError on a rank that is not in the group, and sends nothing."""

    def body(ctx: RankContext) -> list[str]:
        group = dist.new_group([1])
        return [] if ctx.rank else [refusal(call, group) for call in calls.values()]

    results = run(body, 2)
    named = [f"{what} by a rank that is not in the group" for what in calls]
    expect_refusals(results[0], named, rank=0)
    sent = [event for event in results.logs[0].events if event.op != "store"]
    if sent:
        fail(f"rank 0 issued {sent[0]} before it refused", cause="late-check", rank=0)


def layers(width: int = 4, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3), *more)


OTHER: dict[str, Callable[[], nn.Module]] = {
    "a wider layer": lambda: layers(5),
    "a layer more": lambda: layers(4, nn.Linear(3, 3)),
    "float64": lambda: layers().double(),
}


def check_models_that_differ(run: Any, start: Callable[[nn.Module], object]) -> None:
    """``start(model)`` raises ValueError on every rank if rank 1 has another model."""

    def body(ctx: RankContext) -> list[str]:
        return [refusal(start, make() if ctx.rank == 1 else layers()) for make in OTHER.values()]

    for rank, refusals in enumerate(run(body, 3)):
        expect_refusals(refusals, [f"rank 1 alone has {what}" for what in OTHER], rank=rank)
