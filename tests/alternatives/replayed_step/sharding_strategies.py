# for: 3.21
"""Written differently: the step is replayed on an account of what is in memory, entry by entry."""

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

__all__ = ["Links", "choose_strategy", "estimate", "smallest_budget"]


class Account:
    """Named amounts of bytes, their sum, and the most that it has been."""

    def __init__(self):
        self.entries = {}
        self.most = 0

    def hold(self, nbytes, *name):
        self.entries[name] = nbytes

    def drop(self, *name):
        return self.entries.pop(name, 0)

    def look(self, activations):
        self.most = max(self.most, activations + sum(self.entries.values()))


def replay_sharded(p, ranks, strategy):
    account, last = Account(), len(p.parameters) - 1
    account.hold(p.parameters[0], "full", 0)

    def gather(unit):
        if 0 < unit <= last:
            account.hold(p.parameters[unit], "full", unit)

    def arrived(unit):
        chunk = account.drop("chunk", unit)
        if strategy != "offload" and 0 < unit <= last:
            account.hold(chunk, "shard", unit)
        account.drop("joined", unit)

    for phase in p.phases:
        unit = phase.unit
        if not phase.backward:
            for other in range(1, last):
                account.drop("full", other)
            if unit or phase is p.phases[0]:
                gather(unit)
                gather(unit + 1)
        else:
            account.hold(phase.of_root, "root's gradients")
            if unit:
                after = unit + 1
                account.drop("full", after)
                arrived(unit + 2)
                if account.drop("gradients", after) and strategy != "hybrid":
                    account.hold(p.gradients[after], "joined", after)
                if after <= last:
                    account.hold(p.gradients[after] // ranks, "chunk", after)
                gather(unit)
                gather(unit - 1)
                others = p.gradients[unit] - p.largest[unit]
                account.hold(others or 1e-9, "gradients", unit)
        account.look(phase.activations)
    reduced = 0 if strategy == "offload" else sum(p.gradients[1:]) // ranks
    return max(account.most, 2 * p.gradients[0] + reduced)


def replay_zero2(p, ranks, bucket_bytes):
    whole = sum(p.gradients)
    room = 3 * max(min(bucket_bytes, whole), *p.largest)
    most, come = 0, 0
    for phase in p.phases:
        beside = 0
        if phase.backward and phase.unit:
            come += p.gradients[phase.unit]
            beside = -p.largest[phase.unit]
        here = come + phase.of_root if phase.backward else 0
        most = max(most, phase.activations + beside + min(here, room) + here // ranks)
    return max(most, min(2 * whole, room) + whole // ranks)


def estimate(
    profile, strategy, nodes, ranks_per_node, *, links=None, backwards=1, bucket_bytes=25 << 20
):
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy!r} is none of {STRATEGIES}")
    for what in (nodes, ranks_per_node, backwards, bucket_bytes):
        if what < 1:
            raise ValueError(f"at least one node, rank, backward pass and byte, not {what}")
    links = links or Links()
    ranks, trained, full = nodes * ranks_per_node, sum(profile.gradients), sum(profile.parameters)
    state, cut = int(profile.state * trained), ranks
    if strategy == "hybrid":
        cut = ranks_per_node
    kept = {
        "ddp": (full, trained, state),
        "zero1": (full, trained, state // cut),
        "zero2": (full, trained // cut, state // cut),
    }.get(strategy, (full // cut, trained // cut, state // cut))
    host = 0
    if strategy == "offload":
        host, kept = sum(kept), (0, 0, 0)
    weights, gradients, moments = kept
    beside = weights + moments + profile.buffers
    if strategy in ("ddp", "zero1"):
        most = max(phase.activations for phase in profile.phases) + trained
        most = max(most, trained + 2 * min(max(profile.largest), moments), 2 * trained - moments)
    elif strategy == "zero2":
        most = replay_zero2(profile, cut, bucket_bytes)
        most = max(most, gradients + 2 * min(max(profile.largest), trained // cut))
    else:
        most = replay_sharded(profile, cut, strategy)
        if strategy != "offload":
            most = max(most, gradients + 2 * max(profile.parameters) // cut)
    sent, across, seconds = wire(profile, strategy, nodes, ranks_per_node, links, backwards)
    return Estimate(
        strategy, weights, gradients, moments, profile.saved, int(beside + most), host,
        int(sent), int(across), seconds,
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
