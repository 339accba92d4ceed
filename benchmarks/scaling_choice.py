"""Exercise 3.21's choices beside the fastest simulated strategy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from distlab.hardware.clusters import Cluster, load_cluster
from distlab.ranks import RankContext
from distlab.simulate.models import blocks_of, model_spec
from distlab.virtual import run_virtual
from given.step_profile import Phase, Profile, profile
from solutions.phase3_multi_node.sharding_strategies import Links, choose_strategy

Cell = dict[str, Any]
Cells = dict[tuple[str, str, int], Cell]  # (cluster, row, GPUs)
SIMULATED = {  # name in 3.21: the row
    "ddp": "DDP in buckets",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP with prefetch",
    "hybrid": "hybrid FSDP",
}
BUDGETS = {"resnet50": (80e9,), "gpt-1b": (80e9, 22e9, 18e9), "gpt-7b": (80e9, 40e9, 20e9)}


def profile_of(model: str) -> Profile:
    """Exercise 3.21's profile of a model's usual step, taken in a process of its own."""

    def body(ctx: RankContext) -> dict[str, Any]:
        spec = model_spec(model)
        dtype = getattr(torch, spec.dtype)
        with torch.device("meta"):
            built = spec.build().to(dtype)
        batch = spec.inputs(spec.batch, "meta", dtype)
        return asdict(profile(built, batch, spec.optimizer, units=blocks_of(built)))

    (found,) = run_virtual(body, 1, timeout=120)
    found["phases"] = tuple(Phase(**phase) for phase in found["phases"])
    return Profile(**found)


def links_of(cluster: Cluster) -> Links:
    """The cluster's links as exercise 3.21 wants them."""
    between = cluster.between.bandwidth * cluster.nics_per_node
    return Links(inside=cluster.inside.bandwidth, between=between)


def choice_of(profile: Profile, cluster: Cluster, gpus: int, budget: float) -> str:
    """The choice of exercise 3.21; "none" if nothing fits."""
    local = min(gpus, cluster.gpus_per_node)
    try:
        choice = choose_strategy(
            profile, int(budget), gpus // local, local, links=links_of(cluster)
        )
    except ValueError:
        return "none"
    return choice.strategy


def fastest_of(cells: Cells, cluster: str, gpus: int, budget: float) -> list[tuple[str, Cell]]:
    """(3.21's name, cell) of the simulated strategies that fit, the fastest first."""
    found = [
        (name, cells[cluster, row, gpus])
        for name, row in SIMULATED.items()
        if (cluster, row, gpus) in cells and (name != "hybrid" or gpus > 8)
    ]
    return sorted(
        ((name, cell) for name, cell in found if cell["memory"] <= budget),
        key=lambda pair: pair[1]["step"],
    )


def choices(cells: Cells, model: str, counts: tuple[int, ...]) -> Iterator[list[str]]:
    """Rows: cluster, memory, GPUs, 3.21's choice, the simulation's choice, the
    cost of the difference."""
    known = profile_of(model)
    for name in dict.fromkeys(cluster for cluster, _, _ in cells):
        cluster = load_cluster(name)
        memory = cluster.gpu.memory
        for budget in (b for b in BUDGETS[model] if b <= memory or b == max(BUDGETS[model])):
            for gpus in (g for g in counts[1:] if (name, SIMULATED["ddp"], g) in cells):
                chosen = choice_of(known, cluster, gpus, min(budget, memory))
                fitting = fastest_of(cells, name, gpus, min(budget, memory))
                of = dict(fitting)
                best = fitting[0][0] if fitting else "none"
                if chosen == best:
                    cost = "the same"
                elif chosen in of:
                    cost = f"{of[chosen]['step'] / of[best]['step'] - 1:+.1%} time"
                else:
                    cost = "3.21's is not simulated" if chosen == "offload" else "does not fit"
                size = f"{min(budget, memory) / 1e9:.0f} GB"
                yield [name, size, str(gpus), chosen, best, cost]


def merged(rows: list[list[str]]) -> list[list[str]]:
    """Join rows that differ only in the number of GPUs and in the cost."""
    found: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for model, cluster, memory, gpus, ours, best, cost in rows:
        counts, costs = found.setdefault((model, cluster, memory, ours, best), ([], []))
        counts.append(gpus)
        costs.append(cost)
    return [
        [*key[:3], " ".join(counts), *key[3:], span_of(costs)]
        for key, (counts, costs) in found.items()
    ]


def span_of(costs: list[str]) -> str:
    """One text for several texts: the first and the last, if they differ."""
    return costs[0] if len(set(costs)) == 1 else f"{costs[0]} … {costs[-1]}"
