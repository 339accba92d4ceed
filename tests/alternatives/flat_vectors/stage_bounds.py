# for: 2.20
"""Written from the docstrings alone."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group


def parameter_costs(layers: Sequence[nn.Module]) -> list[int]:
    owner: dict[int, int] = {}
    costs = [0] * len(layers)
    for i, layer in enumerate(layers):
        for p in layer.parameters():
            if owner.setdefault(id(p), i) == i:
                costs[i] += p.nbytes
    return costs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_costs(
    layers: Sequence[nn.Module], example: Tensor, *, repeats: int = 5, group: Group = None
) -> list[float]:
    if repeats < 1:
        raise ValueError("no repeats")
    message = torch.full((len(layers),), math.nan, dtype=torch.float64)
    errors = []
    if dist.get_rank(group) == 0:
        cuda = [example.device.index] if example.is_cuda else []
        with torch.random.fork_rng(devices=cuda):
            trials = [copy.deepcopy(layer) for layer in layers]
            seconds: list[list[float]] = [[] for _ in trials]
            try:
                for _ in range(1 + repeats):
                    x = example.detach()
                    for layer, times in zip(trials, seconds, strict=True):
                        spent, x = timed(layer, x)
                        times.append(spent)
                medians = [statistics.median(t[1:]) for t in seconds]
                message = torch.tensor(medians, dtype=torch.float64)
            except Exception as error:
                errors.append(error)
    message = message.to(example.device)
    root = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)[0]
    dist.broadcast(message, src=root, group=group)
    if errors:
        raise errors.pop()
    if message.isnan().any():
        raise RuntimeError("the first rank has an error")
    return [float(seconds) for seconds in message]


def timed(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    start_value = x.detach().clone()
    if x.is_floating_point():
        start_value.requires_grad = True
    with torch.enable_grad():
        synchronize(x.device)
        begin = time.perf_counter()
        output = layer(start_value.clone() if x.is_floating_point() else start_value)
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        synchronize(x.device)
        end = time.perf_counter()
    return (end - begin, output.detach())


def partition(costs: Sequence[float], stages: int) -> list[int]:
    n = len(costs)
    if stages < 1 or stages > n:
        raise ValueError(f"{stages} stages of {n} layers")
    for cost in costs:
        if not cost >= 0 or cost == math.inf:
            raise ValueError(f"a cost of {cost}")
    best = [0] * (n + 1)
    for i in range(n - 1, -1, -1):
        best[i] = best[i + 1] + costs[i]
    ends = [[n] * (n + 1)]
    for s in range(1, stages):
        now, end = ([math.inf] * (n + 1), [n] * (n + 1))
        for i in range(n - s):
            own = 0
            found = None
            for e in range(i + 1, n - s + 1):
                own = own + costs[e - 1]
                largest = max(own, best[e])
                if found is None or largest < found:
                    found, end[i] = (largest, e)
                if own >= found:
                    break
            now[i] = found
        best = now
        ends.append(end)
    bounds = [0]
    for end in reversed(ends):
        bounds.append(end[bounds[-1]])
    return bounds
