# for: 3.21
"""Written differently: fractions of bytes until the end, and a sorted table of what fits."""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed as dist

from given.agreement import Group, rank_in
from given.step_profile import Profile
from solutions.phase3_multi_node.sharding_strategies import Choice, Estimate, Links, readable
from solutions.phase3_multi_node.strategy_memory import STRATEGIES, memory_of

LINKS = Links()


def estimate(
    profile: Profile,
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    links: Links = LINKS,
    backwards: int = 1,
    bucket_bytes: int = 25 * 2**20,
) -> Estimate:
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}: there is {', '.join(STRATEGIES)}")
    if min(nodes, ranks_per_node, backwards, bucket_bytes) < 1:
        raise ValueError("all numbers must be positive")
    needed = memory_of(profile, strategy, nodes, ranks_per_node, bucket_bytes=bucket_bytes)
    sent, across, seconds = traffic(profile, strategy, nodes, ranks_per_node, links, backwards)
    return Estimate(
        strategy=strategy,
        parameters=needed.parameters,
        gradients=needed.gradients,
        optimizer=needed.optimizer,
        activations=profile.saved,
        peak=needed.peak,
        host=needed.host,
        sent=sent,
        across=across,
        seconds=seconds,
    )


def traffic(
    profile: Profile, strategy: str, nodes: int, ranks_per_node: int, links: Links, backwards: int
) -> tuple[int, int, float]:

    def part(of: int, ranks: int) -> Fraction:
        return Fraction(of * (ranks - 1), ranks)

    world, t, g = nodes * ranks_per_node, sum(profile.parameters), sum(profile.gradients)
    stays = profile.parameters[0] + (profile.parameters[-1] if len(profile.parameters) > 1 else 0)
    fsdp = backwards * (2 * t - stays + g)
    if strategy == "hybrid":
        inside, leaves = part(fsdp, ranks_per_node), part(2 * backwards * g, nodes)
        sent = inside + leaves / ranks_per_node
        return (
            int(sent),
            int(leaves),
            float(inside) / links.inside + float(leaves) / links.between,
        )
    if strategy == "ddp":
        sent = part(2 * g, world)
    elif strategy == "zero1":
        sent = part(3 * g, world)
    elif strategy == "zero2":
        sent = part((backwards + 1) * g, world)
    else:
        sent = part(fsdp, world)
    pace = links.inside if nodes == 1 else min(links.inside, links.between)
    seconds = float(sent) / pace
    if strategy == "offload":
        seconds += fsdp / world / links.host
    return (int(sent), 0 if nodes == 1 else int(sent), seconds)


def choose_strategy(
    profile: Profile,
    budget_bytes: int,
    nodes: int,
    ranks_per_node: int,
    *,
    strategy: str = "auto",
    links: Links = LINKS,
    backwards: int = 1,
    bucket_bytes: int = 25 * 2**20,
) -> Choice:
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"unknown strategy {strategy!r}")
    names = [*STRATEGIES]
    if strategy != "hybrid" and min(nodes, ranks_per_node) < 2:
        names.remove("hybrid")
    table = {
        name: estimate(
            profile,
            name,
            nodes,
            ranks_per_node,
            links=links,
            backwards=backwards,
            bucket_bytes=bucket_bytes,
        )
        for name in names
    }
    best = strategy
    if strategy == "auto":
        ranked = sorted(
            (
                (table[name].seconds, place, name)
                for place, name in enumerate(names)
                if table[name].peak <= budget_bytes
            )
        )
        if not ranked:
            raise ValueError(f"no strategy fits into {readable(budget_bytes)}")
        best = ranked[0][2]
    return Choice(best, budget_bytes, tuple(table.values()))


def smallest_budget(own_bytes: int, device: torch.device | str = "cpu", group: Group = None) -> int:
    rank_in(group)
    negative = torch.full((1,), -int(own_bytes), dtype=torch.long, device=device)
    dist.all_reduce(negative, op=dist.ReduceOp.MAX, group=group)
    return -negative.tolist()[0]
