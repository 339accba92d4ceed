# for: 3.21
"""Written differently: rounds of a ring, sorted by time until one fits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase3_multi_node.sharding_strategies import (
    STRATEGIES,
    Choice,
    Estimate,
    Links,
    readable,
)

from .strategy_memory import memory_of

__all__ = ["Links", "choose_strategy", "estimate", "smallest_budget"]


def estimate(
    profile, strategy, nodes, ranks_per_node, *, links=None, backwards=1, bucket_bytes=25 << 20
):
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy!r} is none of {STRATEGIES}")
    for what in (nodes, ranks_per_node, backwards, bucket_bytes):
        if what < 1:
            raise ValueError(f"at least one node, rank, backward pass and byte, not {what}")
    links = links or Links()
    needed = memory_of(profile, strategy, nodes, ranks_per_node, bucket_bytes=bucket_bytes)
    sent, across, seconds = wire(profile, strategy, nodes, ranks_per_node, links, backwards)
    return Estimate(
        strategy, needed.parameters, needed.gradients, needed.optimizer, profile.saved,
        needed.peak, needed.host, int(sent), int(across), seconds,
    )  # fmt: skip


def wire(p, strategy, nodes, local, links, backwards):
    trained, ranks = sum(p.gradients), nodes * local
    if strategy in ("ddp", "zero1", "zero2"):
        rounds = {"ddp": 2, "zero1": 3, "zero2": backwards + 1}[strategy]
        sent = rounds * trained * (1 - 1 / ranks)
    else:
        again = p.parameters[1:-1]  # all but the root and the last unit are gathered twice
        moved = backwards * (sum(p.parameters) + sum(again) + trained)
        if strategy == "hybrid":
            inside = moved * (1 - 1 / local)
            across = 2 * backwards * trained * (1 - 1 / nodes)
            spent = inside / links.inside + across / links.between
            return inside + across / local, across, spent
        sent = moved * (1 - 1 / ranks)
    slowest = links.inside if nodes == 1 else min(links.between, links.inside)
    seconds = sent / slowest
    if strategy == "offload":
        seconds += moved / ranks / links.host
    return sent, sent * (nodes > 1), seconds


def choose_strategy(
    profile, budget_bytes, nodes, ranks_per_node, *, strategy="auto", links=None, **options
):
    considered = list(STRATEGIES)
    if strategy != "hybrid" and (nodes == 1 or ranks_per_node == 1):
        considered.remove("hybrid")
    if strategy not in (*STRATEGIES, "auto"):
        raise ValueError(f"{strategy!r} is none of {STRATEGIES}, nor auto")
    found = tuple(
        estimate(profile, n, nodes, ranks_per_node, links=links, **options) for n in considered
    )
    if strategy == "auto":
        for one in sorted(found, key=lambda e: e.seconds):
            if one.peak <= budget_bytes:
                return Choice(one.strategy, budget_bytes, found)
        need, name = min((e.peak, e.strategy) for e in found)
        raise ValueError(f"nothing fits: the least needs {readable(need)}, with {name}")
    return Choice(strategy, budget_bytes, found)


def smallest_budget(own_bytes, device="cpu", group=None):
    if dist.get_rank(group) == -1:
        raise ValueError("this rank is not in the group")
    own = torch.tensor([-own_bytes], dtype=torch.int64, device=device)
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    return -own.item()
