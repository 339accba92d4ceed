"""Phase 3's join against torch's Join: time of a step while ranks run out of batches.

Both train in the same ranks on the same batches, in turn. Rank r has r batches less than rank 0, so
W-1 ranks end as shadows. torch's shadows skip the optimizer, and get the weights at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node.uneven_inputs import UnevenDDP

from .common import in_turn, now
from .ddp import MODELS, TORCHS, batch, wrapped
from .pairs import Case, Paired, Start

MOST = {"MLP, 8.5 M": 4, "digits CNN": 20, "GPT, 4 layers": 6}  # batches of rank 0


def epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, own: list[tuple[Tensor, Tensor]]
) -> None:
    """One epoch, with the join that belongs to ``net``."""
    if not isinstance(net, UnevenDDP):
        with Join([net], divide_by_initial_world_size=False):
            for inputs, targets in own:
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
        return
    with net.join(own) as steps:
        for found in steps:
            optimizer.zero_grad()
            if found is None:
                net.shadow()
            else:
                F.cross_entropy(net(found[0]), found[1]).backward()
            optimizer.step()


def timed(net: nn.Module, own: list[tuple[Tensor, Tensor]], most: int) -> Callable[[], float]:
    """Milliseconds of a step, the mean of an epoch; the ranks start together."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def measure() -> float:
        dist.barrier()
        begun = now(own[0][0].device)
        epoch(net, optimizer, own)
        return (now(own[0][0].device) - begun) / most * 1e3

    return measure


def compare(model: str, world_size: int, repeats: int, number: int = 0) -> list[list[float]]:
    """Milliseconds of a step in each round, the solution's first."""

    def body(ctx: RankContext) -> list[list[float]]:
        own = [batch(model, ctx.rank)] * (MOST[model] - ctx.rank)
        nets = [wrapped(model, UnevenDDP), wrapped(model, TORCHS)]
        contestants = {str(k): timed(net, own, MOST[model]) for k, net in enumerate(nets)}
        in_turn(contestants, 2)  # buckets are made anew after the first backward
        for mine, torchs in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-4)  # the same training
        taken = in_turn(contestants, repeats, number)
        return [taken["0"], taken["1"]]

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def start(model: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    mine, torchs = compare(model, world_size, rounds, number)
    return Start({"solution": mine, "torch Join": torchs})


PAIRED = Paired(
    title="Uneven inputs: a training step in a join",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "torch Join")],
    cases=lambda: [
        Case((model, str(world_size)), partial(start, model, world_size))
        for model in MODELS
        for world_size in (2, 4)
    ],
    rounds=9,
    note="SGD. Rank r has r batches less than rank 0. In a step torch sends an all-reduce of the "
    "ranks that are left and the buffers, the solution an all-gather of weights and the buffers. "
    "The solution's shadows step their optimizer; torch's get the weights once, at the end. torch "
    "sends its notice and goes on; the solution waits for it, because it names the rank whose "
    "buffers count. A small model on more ranks than cores shows this wait. An all-reduce of the "
    "weights instead of an all-gather was tried, and is no faster (0.97 to 1.07 of the time).",
)
