"""Compression hooks against torch's own: the time of a training step.

Phase 3's DDP with the solutions' hooks, and torch's DDP with ``ddp_comm_hooks``, train the same
model on the same batches in the same ranks, in turn. With PowerSGD all gradients are in one bucket.
torch's hook begins its second all-reduce in a callback, and with several buckets the order of
callbacks differs from rank to rank. gloo fails then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext, run_ranks
from given.bucket_hooks import Hook
from solutions.phase3_multi_node.comm_hooks import bf16_compress, fp16_compress
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase3_multi_node.overlap import MIB
from solutions.phase4_production.powersgd import PowerSGD

from .common import Table, in_turn, spread
from .ddp import STEPS, TORCHS, batch, stepper, wrapped

RANK = 2
ONE_BUCKET = 1000  # MB
WARM_UP = 4  # rounds: buckets are made anew, and torch's PowerSGD begins in its third step
Wrap = Callable[[nn.Module], nn.Module]


def ours(hook: Callable[[nn.Module], Hook], megabytes: int = 25) -> Wrap:
    """Phase 3's DDP with a new hook for the module, and buckets of so many MB."""

    def wrap(module: nn.Module) -> nn.Module:
        net = DDP(module, bucket_bytes=megabytes * MIB, first_bucket_bytes=megabytes * MIB)
        net.register_comm_hook(hook(module))
        return net

    return wrap


def torchs(hook: Callable[..., object], state: Callable[[], object], megabytes: int = 25) -> Wrap:
    """torch's DDP with one of its hooks."""

    def wrap(module: nn.Module) -> DistributedDataParallel:
        net = TORCHS(module, bucket_cap_mb=megabytes)
        net.register_comm_hook(state(), hook)
        return net

    return wrap


def power_state() -> powerSGD_hook.PowerSGDState:
    """The state with which torch's hook compresses like the solution."""
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1
    )


PAIRS: dict[str, tuple[Wrap, Wrap]] = {
    "bfloat16": (
        ours(lambda module: bf16_compress),
        torchs(default_hooks.bf16_compress_hook, lambda: None),
    ),
    "float16": (
        ours(lambda module: fp16_compress),
        torchs(default_hooks.fp16_compress_hook, lambda: None),
    ),
    f"PowerSGD, rank {RANK}": (
        ours(lambda module: PowerSGD(module.parameters(), RANK), ONE_BUCKET),
        torchs(powerSGD_hook.powerSGD_hook, power_state, ONE_BUCKET),
    ),
}
MODELS = ("MLP, 8.5 M", "GPT, 4 layers")


def compare(
    model: str, pair: tuple[Wrap, Wrap], world_size: int, repeats: int
) -> list[list[float]]:
    """For both contestants: milliseconds of a step in each round."""

    def body(ctx: RankContext) -> list[list[float]]:
        nets = [wrapped(model, wrap) for wrap in pair]
        data = batch(model, ctx.rank)
        contestants = {}
        for k, net in enumerate(nets):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            contestants[str(k)] = stepper(net, optimizer, STEPS[model], *data)
        in_turn(contestants, WARM_UP)
        return [*in_turn(contestants, repeats).values()]

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def measure(repeats: int = 7) -> Table:
    """Milliseconds side by side."""
    rows = []
    for model in MODELS:
        for world_size in (2, 4):
            for what, pair in PAIRS.items():
                mine, other = compare(model, pair, world_size, repeats)
                ratio = statistics.median(mine) / statistics.median(other)
                row = [model, str(world_size), what, spread(mine), spread(other)]
                rows.append([*row, f"{ratio:.2f}"])
    return Table(
        "Compression hooks: milliseconds of a training step",
        ["model", "ranks", "", "solution", "torch's hook", "ratio"],
        rows,
        f"SGD; median (least … most) of {repeats} rounds taken in turn in the same ranks. Phase "
        "3's DDP with the solutions' hooks; torch's with bf16_compress_hook, fp16_compress_hook "
        "and powerSGD_hook (the same matrices compressed, warm start and error feedback in both), "
        "which gets one bucket, like the solution then: over gloo it fails with several.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
