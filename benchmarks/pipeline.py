"""Pipelines: the interpreter of phase 2 against torch.distributed.pipelining.

Both run GPipe, 1F1B, interleaved 1F1B, and the zero-bubble schedules with two stages per rank. They
run in the same ranks, step by step in turn, on the same stages and the same batch, and leave the
loss on every rank. Memory is measured in separate steps:
the most micro-batches whose graph a rank keeps, and the bytes of all tensors that a step makes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.pipeline_parallel import Pipeline, make_schedule
from solutions.phase2_advanced.pipeline_schedules import with_messages
from solutions.phase2_advanced.zero_bubble import ZeroBubblePipeline
from solutions.phase2_advanced.zero_bubble_v import interleaved_zero_bubble, zero_bubble_v

from .common import now, turns
from .pairs import Case, Paired, Start

WIDTH, SIZE, MICRO_BATCHES, LAYERS = 512, 64, 8, 8
THEIRS: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved zero bubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZB-V": pipelining.ScheduleZBVZeroBubble,
}
ORDERS = {  # with W
    "interleaved zero bubble": lambda ranks: interleaved_zero_bubble(ranks, MICRO_BATCHES, 2),
    "ZB-V": lambda ranks: zero_bubble_v(ranks, MICRO_BATCHES),
}
Step = Callable[[], float]


class Kept:
    """How many graphs are kept for backward, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, tensor: Tensor) -> None:
        """Count until ``tensor`` is freed."""
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.remove)

    def remove(self) -> None:
        """One is freed."""
        self.now -= 1


class Marked(torch.autograd.Function):
    """The same values; its graph is counted while it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept) -> Tensor:
        """Save a tensor that lives as long as the graph."""
        marker = torch.empty(1)
        ctx.save_for_backward(marker)
        kept.add(marker)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The same gradient."""
        return gradient, None


class Stage(nn.Sequential):
    """Some layers of the model, and the counter that it uses."""

    kept: Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers."""
        *before, last = self
        linear, activation = last.children()
        for layer in before:
            x = layer(x)
        x = linear(x)
        if self.kept is not None:  # not at the output: torch detaches it in place, no view can be
            x = Marked.apply(x, self.kept)
        y: Tensor = activation(x)
        return y


def stages(count: int) -> list[Stage]:
    """The model, eight layers of 512, in equal parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    size = LAYERS // count
    return [Stage(*layers[k : k + size]) for k in range(0, LAYERS, size)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Mean square."""
    return (output - target).square().mean()


def own_stages(name: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank: one, two in turn, or two in a V."""
    if name == "ZB-V":
        return [rank, 2 * ranks - 1 - rank]
    return [rank] if name in ("gpipe", "1f1b") else [rank, ranks + rank]


def our_step(mine: list[Stage], name: str, ranks: int, batch: tuple[Tensor, Tensor]) -> Step:
    """A step of the interpreter."""
    boundary = torch.empty(SIZE, WIDTH, device="meta")
    count = ranks * len(mine)
    kind = Pipeline
    if name in ORDERS:
        kind, schedule = ZeroBubblePipeline, with_messages(ORDERS[name](ranks))
    else:
        schedule = make_schedule(name, ranks, MICRO_BATCHES, len(mine))
    pipeline = kind(mine, schedule, loss_fn, [boundary] * (count - 1))
    return lambda: pipeline.step(*batch)


def torch_step(
    mine: list[Stage], name: str, ctx: RankContext, batch: tuple[Tensor, Tensor]
) -> Step:
    """The same step by torch's schedule; the loss is broadcast at the end as well."""
    count = ctx.world_size * len(mine)
    own = own_stages(name, ctx.rank, ctx.world_size)
    stage, pairs = pipelining.PipelineStage, zip(mine, own, strict=True)
    parts = [stage(module, number, count, ctx.device) for module, number in pairs]
    chosen = parts[0] if len(parts) == 1 else parts
    schedule = THEIRS[name](chosen, MICRO_BATCHES, loss_fn=loss_fn)
    inputs, targets = batch
    last = 0 if name == "ZB-V" else ctx.world_size - 1

    def step() -> float:
        losses: list[Tensor] = []
        target = targets if ctx.rank == last else None
        schedule.step(*([inputs] if ctx.rank == 0 else []), target=target, losses=losses)
        nothing = torch.zeros((), device=ctx.device)
        loss = torch.stack(losses).mean().detach() if losses else nothing
        dist.broadcast(loss, last)
        return loss.item()

    return step


def compare(
    name: str, ranks: int, repeats: int, device: str = "cpu", number: int = 0
) -> list[dict[str, list[float]]]:
    """Per rank: seconds per step of both, and of each (micro-batches kept, peak bytes, loss)."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(0)
        shape = MICRO_BATCHES * SIZE, WIDTH
        batch = tuple(torch.randn(shape, generator=generator).to(ctx.device) for _ in range(2))
        own = own_stages(name, ctx.rank, ranks)
        mine = [stages(ranks * len(own))[stage].to(ctx.device) for stage in own]
        theirs = copy.deepcopy(mine)
        steps = {
            "ours": our_step(mine, name, ranks, batch),
            "torch": torch_step(theirs, name, ctx, batch),
        }
        facts: dict[str, list[float]] = {}
        for who, parts in (("ours", mine), ("torch", theirs)):
            steps[who]()  # connections, shapes, gradients
            kept = Kept()
            for part in parts:
                part.kept = kept
                part.zero_grad(set_to_none=False)  # torch scales gradients that are there, too
            with PeakMemory() as memory:
                loss = steps[who]()
            for part in parts:
                part.kept = None
            facts[f"{who} facts"] = [float(kept.most), float(memory.peak), loss]
        for a, b in zip(mine, theirs, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        seconds: dict[str, list[float]] = {"ours": [], "torch": []}
        for who in turns(steps, repeats, number):
            dist.barrier()
            begun = now(ctx.device)
            steps[who]()
            seconds[who].append(now(ctx.device) - begun)
        return seconds | facts

    return run_ranks(body, ranks, ledger=False, timeout=300, device=device)


def start(name: str, ranks: int, rounds: int, number: int) -> Start:
    """One start of the ranks. A step takes as long as on its slowest rank; graphs and bytes are
    those of the rank with the most."""
    found = compare(name, ranks, rounds, number=number)
    slowest = {
        who: [1e3 * max(times) for times in zip(*(f[who] for f in found), strict=True)]
        for who in ("ours", "torch")
    }
    facts = {}
    for k, (heading, scale, digits) in enumerate(zip(FACTS, (1, 1e6), (0, 2), strict=True)):
        most = (max(f[f"{who} facts"][k] for f in found) / scale for who in ("ours", "torch"))
        facts[heading] = " / ".join(f"{n:.{digits}f}" for n in most)
    return Start(slowest, facts)


FACTS = ("graphs kept, ours / torch", "peak MB, ours / torch")
PAIRED = Paired(
    title="Pipelines, a step",
    labels=("schedule", "ranks"),
    unit="ms",
    pairs=[("ours", "torch")],
    facts=FACTS,
    cases=lambda: [
        Case((name, str(ranks)), partial(start, name, ranks)) for ranks in (2, 4) for name in THEIRS
    ],
    rounds=11,
    note=f"Phase 2's interpreter against torch.distributed.pipelining. {LAYERS} layers of {WIDTH}, "
    f"{MICRO_BATCHES} micro-batches of {SIZE}; one stage per rank with gpipe and 1f1b, else two. "
    "A step takes as long as its slowest rank. Graphs and bytes are those of the rank with the "
    "most. Gradients exist before the step. So bytes are those of activations, messages, and "
    "gradients that are being computed.",
)
