"""PyTorch's scenarios of pipelining, beside ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.distributed.pipelining imports it: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from distlab.ranks import RankContext
from solutions.phase2_advanced.pipeline_parallel import Pipeline, make_schedule
from solutions.phase2_advanced.pipeline_schedules import (
    Schedule,
    Step,
    rank_of_stages,
    validate,
    with_messages,
)
from solutions.phase2_advanced.zero_bubble import (
    ZeroBubblePipeline,
    split_forward,
    weight_gradients,
    zero_bubble,
)
from solutions.phase2_advanced.zero_bubble_v import interleaved_zero_bubble, zero_bubble_v
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, gradients, refused, seeded

SCENARIOS = Scenarios()
PER, WIDTH = 3, 6


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


def parts(count: int) -> list[nn.Module]:
    """All stages of a model."""

    def make() -> nn.Module:
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        )

    return list(seeded(make).children())


def data(m: int, salt: int = 0) -> tuple[Tensor, Tensor]:
    """A whole batch, equal on all ranks."""
    draw = torch.Generator().manual_seed(salt)
    return torch.randn(m * PER, WIDTH, generator=draw), torch.arange(m * PER) % WIDTH


def edges(stages: int) -> list[Tensor]:
    return [torch.empty(PER, WIDTH, device="meta") for _ in range(stages - 1)]


def run_ours(
    ctx: RankContext, plan: Schedule, stages: int, m: int, kind: type[Pipeline] = Pipeline
) -> list[Any]:
    """Two steps with the course's pipeline: losses and gradients of this rank's stages.

    Gradients are cleared between: torch divides what is there before a step once more.
    """
    owner, own = rank_of_stages(plan), parts(stages)
    mine = [own[s] for s in range(stages) if owner[s] == ctx.rank]
    pipeline = kind(mine, plan, F.cross_entropy, edges(stages))
    found = []
    for salt in (0, 1):
        loss = pipeline.step(*data(m, salt))
        found.append([loss, [gradients(stage) for stage in mine]])
        for stage in mine:
            stage.zero_grad()
    return found


def run_torchs(ctx: RankContext, kind: Any, stages: int, m: int, own: Sequence[int]) -> list[Any]:
    """The same with a schedule class of torch's; the loss goes to all ranks by hand."""
    modules = parts(stages)
    cpu = torch.device("cpu")
    made = [pipelining.PipelineStage(modules[s], s, stages, cpu) for s in own]
    one = made[0] if issubclass(kind, schedules.PipelineScheduleSingle) else made
    schedule = kind(one, m, loss_fn=F.cross_entropy)
    last = stages - 1 in own
    found = []
    for salt in (0, 1):
        x, y = data(m, salt)
        losses: list[Tensor] = []
        schedule.step(*([x] if 0 in own else []), target=y if last else None, losses=losses)
        mean = torch.stack(losses).mean() if last else torch.zeros(())
        torch.distributed.all_reduce(mean)
        found.append([float(mean), [gradients(modules[s]) for s in own]])
        for module in modules:
            module.zero_grad()
    return found


@SCENARIOS.ported
def test_gpipe_and_1f1b(ctx: RankContext) -> Pair:
    """Losses and gradients of two steps."""
    kinds = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    ours = [run_ours(ctx, make_schedule(name, 2, 4), 2, 4) for name in kinds]
    return ours, [run_torchs(ctx, kind, 2, 4, [ctx.rank]) for kind in kinds.values()]


@SCENARIOS.ported
def test_interleaved_stages(ctx: RankContext) -> Pair:
    """Two stages per rank, in turn."""
    ours = run_ours(ctx, make_schedule("interleaved", 2, 4, 2), 4, 4)
    kind = schedules.ScheduleInterleaved1F1B
    return ours, run_torchs(ctx, kind, 4, 4, [ctx.rank, ctx.rank + 2])


@SCENARIOS.newer
def test_weight_gradients_of_their_own(ctx: RankContext) -> Pair:
    """A zero-bubble schedule, beside torch's with the same stages."""
    ours = run_ours(ctx, with_messages(zero_bubble(2, 4)), 2, 4, ZeroBubblePipeline)
    return ours, run_torchs(ctx, schedules.ScheduleInterleavedZeroBubble, 2, 4, [ctx.rank])


@SCENARIOS.newer
def test_stages_in_the_shape_of_a_v(ctx: RankContext) -> Pair:
    """The first and the last stage on one rank: ZB-V, beside torch's."""
    own = [0, 3] if ctx.rank == 0 else [1, 2]
    ours = run_ours(ctx, with_messages(zero_bubble_v(2, 4)), 4, 4, ZeroBubblePipeline)
    return ours, run_torchs(ctx, schedules.ScheduleZBVZeroBubble, 4, 4, own)


@SCENARIOS.newer
def test_interleaved_stages_without_bubble(ctx: RankContext) -> Pair:
    """Two stages per rank, in turn, with B and W."""
    plan = with_messages(interleaved_zero_bubble(2, 4, 2))
    ours = run_ours(ctx, plan, 4, 4, ZeroBubblePipeline)
    kind = schedules.ScheduleInterleavedZeroBubble
    return ours, run_torchs(ctx, kind, 4, 4, [ctx.rank, ctx.rank + 2])


@SCENARIOS.ported
def test_an_order_of_the_users(ctx: RankContext) -> Pair:
    """Forwards in another order than backwards; gradients as those of a known schedule."""
    own = [
        [Step("F", r, i) for i in (2, 0, 1)] + [Step("B", r, i) for i in (1, 2, 0)]
        for r in range(2)
    ]
    ours = run_ours(ctx, with_messages(own), 2, 3)
    return ours, run_torchs(ctx, schedules.ScheduleGPipe, 2, 3, [ctx.rank])


@SCENARIOS.ported
def test_both_halves_of_a_backward(ctx: RankContext) -> Pair:
    """The input's gradient first, no weight's; then the weights', for several micro-batches."""
    ours, theirs = parts(1)[0], parts(1)[0]
    found: list[list[Any]] = [[], []]
    kept = []
    for salt in (0, 1):
        x = data(1, salt)[0].requires_grad_()
        out, later = split_forward(ours, x)
        out.square().sum().backward()
        kept.append(later)
        found[0] += [x.grad, [p.grad is None for p in ours.parameters()]]
    for later in kept:
        weight_gradients(later)
    for salt in (0, 1):
        x = data(1, salt)[0].requires_grad_()
        out = theirs(x)
        before = [p.grad for p in theirs.parameters()]
        for p in theirs.parameters():
            p.grad = None
        inputs, groups = stage_backward_input([out.square().sum()], None, [x], theirs.parameters())
        found[1] += [inputs[0], [p.grad is None for p in theirs.parameters()]]
        stage_backward_weight(theirs.parameters(), groups)
        for p, old in zip(theirs.parameters(), before, strict=True):
            p.grad = p.grad if old is None else p.grad + old
    return [*found[0], gradients(ours)], [*found[1], gradients(theirs)]


def lines(plan: Schedule, kinds: str) -> list[list[str]]:
    """Compute steps as torch writes them: stage, kind, micro-batch."""
    return [[f"{s.stage}{s.kind}{s.micro_batch}" for s in rank if s.kind in kinds] for rank in plan]


@SCENARIOS.ported
def test_messages_for_an_order(ctx: RankContext) -> Pair:
    """As many sends and receives as torch adds to the same order, on each rank."""
    plan = make_schedule("interleaved", 2, 4, 2)
    ours = [sum("send" in s.kind or "recv" in s.kind for s in rank) for rank in plan]
    order = {
        r: [schedules._Action.from_str(text) for text in rank]
        for r, rank in enumerate(lines(plan, "FB"))
    }
    added = schedules._add_send_recv(order, lambda stage: stage % 2, num_stages=4)
    kinds = ("SEND", "RECV")
    theirs = [sum(any(k in str(a) for k in kinds) for a in added[r]) for r in range(2)]
    return ours, theirs


@SCENARIOS.ported
def test_incomplete_orders_are_refused(ctx: RankContext) -> Pair:
    """A step is missing, or a rank's part."""

    def torchs(plan: Schedule) -> None:
        found = {
            r: [schedules._Action.from_str(text) for text in rank]
            for r, rank in enumerate(lines(plan, "FB"))
        }
        schedules._validate_schedule(found, 2, 2, 2)

    good = make_schedule("1f1b", 2, 2)
    short = [good[0][:-1], good[1]]
    empty = [[], good[1]]
    return tuple(
        [refused(lambda p=p: check(p)) for p in (good, short, empty)]
        for check in (lambda p: validate(p, 2, 2), torchs)
    )
