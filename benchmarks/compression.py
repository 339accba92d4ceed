"""Compression hooks against torch's own: the time of a training step.

Phase 3's DDP with the solutions' hooks, and torch's DDP with ``ddp_comm_hooks``, train the same
model on the same batches in the same ranks, in turn. With PowerSGD all gradients are in one bucket:
torch's hook begins its second all-reduce in a callback, and the order of the callbacks of several
buckets differs from rank to rank, which gloo does not bear.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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

from .common import in_turn
from .ddp import STEPS, TORCHS, batch, stepper, wrapped
from .pairs import Case, Paired, Start

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
    """What makes torch's hook compress as the solution does."""
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
    model: str, pair: tuple[Wrap, Wrap], world_size: int, repeats: int, number: int = 0
) -> list[list[float]]:
    """For both of the pair: milliseconds of a step in each round."""

    def body(ctx: RankContext) -> list[list[float]]:
        nets = [wrapped(model, wrap) for wrap in pair]
        data = batch(model, ctx.rank)
        contestants = {}
        for k, net in enumerate(nets):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            contestants[str(k)] = stepper(net, optimizer, STEPS[model], *data)
        in_turn(contestants, WARM_UP)
        return [*in_turn(contestants, repeats, number).values()]

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def start(model: str, what: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    mine, other = compare(model, PAIRS[what], world_size, rounds, number)
    return Start({"solution": mine, "torch's hook": other})


def cases() -> list[Case]:
    """Models, world sizes and hooks."""
    return [
        Case((model, str(world_size), what), partial(start, model, what, world_size))
        for model in MODELS
        for world_size in (2, 4)
        for what in PAIRS
    ]


PAIRED = Paired(
    title="Compression hooks: a training step",
    labels=("model", "ranks", ""),
    unit="ms",
    pairs=[("solution", "torch's hook")],
    cases=cases,
    rounds=21,
    note="SGD. Phase 3's DDP runs with the solutions' hooks. torch's DDP runs with "
    "bf16_compress_hook, fp16_compress_hook and powerSGD_hook. Both PowerSGD hooks compress the "
    "same matrices, with warm start and error feedback. torch's powerSGD_hook gets one bucket, "
    "because over gloo it fails with several. The solution then gets one bucket as well.",
)
