"""Phase 3's ZeRO-1 against torch's ZeroRedundancyOptimizer: time of a step, and memory.

Both train in the same ranks on the same batches, in turn, under the same DDP. Memory is Adam's
state on the rank that has most of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distlab.observe.memory import held_by
from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node.zero import ZeroOptimizer

from .common import Table, in_turn, spread
from .ddp import MODELS, STEPS, batch, stepper

LARGE = ("MLP, 8.5 M", "GPT, 4 layers")
SHARDED: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    ZeroOptimizer,
    ZeroRedundancyOptimizer,
)


def compare(model: str, world_size: int, repeats: int) -> list[tuple[list[float], int]]:
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
        taken = in_turn(contestants, repeats)
        held = [held_by(net, getattr(o, "optim", o)).optimizer for net, o in state]
        return [(taken[str(k)], held[k]) for k in range(2)]

    results = run_ranks(body, world_size, ledger=False, timeout=300)
    return [(results[0][k][0], max(r[k][1] for r in results)) for k in range(2)]


def measure(repeats: int = 9) -> Table:
    """Milliseconds and bytes side by side."""
    rows = []
    for model in LARGE:
        for world_size in (2, 4):
            (mine, held), (torchs, held_by_torch) = compare(model, world_size, repeats)
            ratio = statistics.median(mine) / statistics.median(torchs)
            row = [model, str(world_size), spread(mine), spread(torchs), f"{ratio:.2f}"]
            rows.append([*row, f"{held / 1e6:.2f}", f"{held_by_torch / 1e6:.2f}"])
    return Table(
        "ZeRO-1: milliseconds of a training step, and MB of Adam's state on the fullest rank",
        ["model", "ranks", "phase 3 solution", "torch ZeRO", "ratio", "MB", "torch's MB"],
        rows,
        f"Adam under torch's DDP; median (least … most) of {repeats} rounds taken in turn in the "
        "same ranks. The solution cuts flat vectors into equal slices; torch's gives whole "
        "parameters to ranks.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
