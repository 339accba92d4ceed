"""Phase 3's ZeRO-1 against torch's ZeroRedundancyOptimizer: time of a step, and memory.

Both train in the same ranks on the same batches, in turn, under the same DDP. Memory is Adam's
state on the rank that has most of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distlab.observe.memory import held_by
from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node.zero import ZeroOptimizer

from .common import in_turn
from .ddp import MODELS, STEPS, batch, stepper
from .pairs import Case, Paired, Start

LARGE = ("MLP, 8.5 M", "GPT, 4 layers")
SHARDED: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    ZeroOptimizer,
    ZeroRedundancyOptimizer,
)


def compare(
    model: str, world_size: int, repeats: int, number: int = 0
) -> list[tuple[list[float], int]]:
    """For both: milliseconds of a step in each round, bytes of state on the fullest rank."""

    def body(ctx: RankContext) -> list[tuple[list[float], int]]:
        contestants, state = {}, []
        for k, sharded in enumerate(SHARDED):
            torch.manual_seed(0)
            net = DistributedDataParallel(MODELS[model](), gradient_as_bucket_view=True)
            optimizer = sharded(net.parameters(), torch.optim.Adam, lr=1e-4)
            contestants[str(k)] = stepper(net, optimizer, STEPS[model], *batch(model, ctx.rank))
            state.append((net, optimizer))
        in_turn(contestants, 2)
        taken = in_turn(contestants, repeats, number)
        held = [held_by(net, getattr(o, "optim", o)).optimizer for net, o in state]
        return [(taken[str(k)], held[k]) for k in range(2)]

    results = run_ranks(body, world_size, ledger=False, timeout=300)
    return [(results[0][k][0], max(r[k][1] for r in results)) for k in range(2)]


def start(model: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    (mine, held), (torchs, by_torch) = compare(model, world_size, rounds, number)
    facts = {"MB": f"{held / 1e6:.2f}", "torch's MB": f"{by_torch / 1e6:.2f}"}
    return Start({"solution": mine, "torch ZeRO": torchs}, facts)


PAIRED = Paired(
    title="ZeRO-1: a training step, and MB of Adam's state on the fullest rank",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "torch ZeRO")],
    facts=("MB", "torch's MB"),
    cases=lambda: [
        Case((model, str(world_size)), partial(start, model, world_size))
        for model in LARGE
        for world_size in (2, 4)
    ],
    rounds=7,
    note="Adam under torch's DDP. The solution cuts flat vectors into equal slices. torch's ZeRO "
    "gives each rank whole parameters.",
)
