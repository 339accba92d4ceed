"""A model split over ranks: the step against torch's, and how good the stages are.

The step compares phase 2's naive model parallelism with torch.distributed.pipelining and one
micro-batch, which is the same algorithm. Both run in the same ranks, step by step in turn. The
stages compare the most expensive stage for the measured costs of a GPT: divided optimally, and in
two obvious ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import GPT
from solutions.phase2_advanced import model_parallel, stage_bounds

from .common import in_turn
from .pairs import Case, Paired, Start

VOCABULARY, LENGTH, BLOCKS, WIDTH, BATCH = 512, 64, 6, 128, 8
STEPS = 5  # per measurement
Step = Callable[[Tensor, Tensor], float]


def layers(untied: bool = False) -> list[nn.Module]:
    """The layers of a GPT; torch's stages know no tied weights, so a copy can take their place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(VOCABULARY, LENGTH, BLOCKS, WIDTH, 4)
    if untied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model_parallel.layers_of(model)


def solution_step(bounds: list[int]) -> Step:
    """A step of phase 2's naive model parallelism."""
    stage = model_parallel.Stage(layers(untied=True), bounds)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    return lambda inputs, targets: model_parallel.train_step(stage, optimizer, inputs, targets)


def torch_step(bounds: list[int]) -> Step:
    """The same with torch's pipeline stages and one micro-batch; the loss is broadcast as well."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    module = nn.Sequential(*layers(untied=True)[bounds[rank] : bounds[rank + 1]])
    stage = PipelineStage(module, rank, last + 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        given = (inputs,) if rank == 0 else ()
        wanted = {"target": targets, "losses": losses} if rank == last else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        loss = losses[0].detach().double() if losses else torch.zeros((), dtype=torch.float64)
        dist.broadcast(loss, last)
        return loss.item()

    return step


def compare(world_size: int, repeats: int, number: int = 0) -> dict[str, list[float]]:
    """Milliseconds per step of both, ``repeats`` times the mean of some steps."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        every = layers()
        bounds = stage_bounds.partition(stage_bounds.parameter_costs(every), ctx.world_size)
        steps = {"solution": solution_step(bounds), "torch": torch_step(bounds)}
        tokens = torch.randint(
            0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
        )
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

        def timed(step: Step) -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step(inputs, targets)
            return (time.perf_counter() - begun) / STEPS * 1e3

        losses = [[step(inputs, targets) for _ in range(3)] for step in steps.values()]
        torch.testing.assert_close(*map(torch.tensor, losses))  # warm, and the same training
        contestants = {name: partial(timed, step) for name, step in steps.items()}
        return in_turn(contestants, repeats, number)

    found: dict[str, list[float]] = run_ranks(body, world_size, ledger=False, timeout=120)[0]
    return found


def equal_counts(costs: Sequence[float], stages: int) -> list[int]:
    """As many layers on every stage."""
    return [len(costs) * stage // stages for stage in range(stages + 1)]


def greedy(costs: Sequence[float], stages: int) -> list[int]:
    """A stage is closed as soon as it has the average cost."""
    bounds, spent, mean = [0], 0.0, sum(costs) / stages
    for layer, cost in enumerate(costs[:-1], 1):
        spent += cost
        missing = stages - len(bounds)
        if missing and (spent >= mean or len(costs) - layer == missing):
            bounds.append(layer)
            spent = 0.0
    return [*bounds, len(costs)]


def stage_quality(stages: int) -> str:
    """The largest stage over the average one for the optimal, greedy and equal division."""

    def body(ctx: RankContext) -> list[float]:
        example = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        return stage_bounds.measured_costs(layers(), example, repeats=9)

    costs: list[float] = run_ranks(body, 1, ledger=False)[0]
    mean = sum(costs) / stages
    ways = [divide(costs, stages) for divide in (stage_bounds.partition, greedy, equal_counts)]
    largest = [max(sum(costs[a:b]) for a, b in pairwise(bounds)) / mean for bounds in ways]
    return " / ".join(f"{value:.2f}" for value in largest)


def start(world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(compare(world_size, rounds, number), {QUALITY: quality(world_size)})


quality = cache(stage_quality)
QUALITY = "largest stage over average: optimal / greedy / equal counts"
PAIRED = Paired(
    title="A GPT split over ranks, one rank at work at a time: a step",
    labels=("stages",),
    unit="ms",
    pairs=[("solution", "torch")],
    facts=(QUALITY,),
    cases=lambda: [Case((str(w),), partial(start, w)) for w in (2, 4)],
    rounds=21,
    note="Phase 2 against torch.distributed.pipelining with one micro-batch. "
    f"{BLOCKS} blocks of width {WIDTH}, {BATCH} sequences of {LENGTH} tokens, SGD; rounds of "
    f"{STEPS} steps. The last column is for the measured costs of the layers.",
)
