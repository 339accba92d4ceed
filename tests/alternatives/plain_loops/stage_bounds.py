# for: 2.20
"""Written from the docstrings alone."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, rank_in


def parameter_costs(layers: Sequence[nn.Module]) -> list[int]:
    counted: set[nn.Parameter] = set()
    costs = []
    for layer in layers:
        own = [p for p in layer.parameters() if p not in counted]
        costs.append(sum(p.numel() * p.element_size() for p in own))
        counted.update(own)
    return costs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_costs(
    layers: Sequence[nn.Module], example: Tensor, *, repeats: int = 5, group: Group = None
) -> list[float]:
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    costs = torch.zeros(len(layers), dtype=torch.float64, device=example.device)
    failure = None
    if rank_in(group) == 0:
        devices = [example.device] if example.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            x = example.detach()
            try:
                for i, layer in enumerate(layers):
                    trial = copy.deepcopy(layer)
                    runs = [timed(trial, x) for _ in range(repeats + 1)]
                    costs[i] = statistics.median([seconds for seconds, _ in runs[1:]])
                    x = runs[-1][1]
            except Exception as error:
                failure = error
                costs.fill_(-1.0)
    dist.broadcast(costs, group=group, group_src=0)
    if failure is not None:
        raise failure
    if (costs < 0).any():
        raise RuntimeError("rank 0 could not run the layers")
    return costs.tolist()


def timed(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().clone()
        if leaf.is_floating_point():
            leaf = leaf.requires_grad_().clone()
        synchronize(x.device)
        start = time.perf_counter()
        y = layer(leaf)
        if y.requires_grad:
            y.backward(torch.ones_like(y))
        synchronize(x.device)
        seconds = time.perf_counter() - start
    return (seconds, y.detach())


def partition(costs: Sequence[float], stages: int) -> list[int]:
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers can't be divided into {stages} stages")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError("costs must be finite and not negative")
    total = [0, *accumulate(costs)]
    best = total
    begins: list[list[int]] = []
    for s in range(1, stages):
        better, begin = ([math.inf] * (count + 1), [0] * (count + 1))
        for n in range(s + 1, count + 1):
            largest = [max(best[b], total[n] - total[b]) for b in range(s, n)]
            better[n] = min(largest)
            begin[n] = s + largest.index(better[n])
        best = better
        begins.append(begin)
    bounds = [count]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return [0, *reversed(bounds)]
