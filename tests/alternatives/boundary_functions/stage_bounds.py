# for: 2.20
"""Written differently: bounds by bisection over all possible bottlenecks, costs as an object."""

from __future__ import annotations

import copy
import time

import torch
import torch.distributed as dist


def parameter_costs(layers):
    owner = {}
    for number, layer in enumerate(layers):
        for p in layer.parameters():
            owner.setdefault(p, number)
    return [sum(p.nbytes for p, o in owner.items() if o == n) for n in range(len(layers))]


def measured_costs(layers, example, *, repeats=5, group=None):
    if repeats <= 0:
        raise ValueError(f"{repeats} runs have no median")
    found = [None]
    if not dist.get_rank(group):
        state = torch.get_rng_state()
        try:
            found = [medians(layers, example, repeats)]
        except Exception as error:
            found = [error]
        torch.set_rng_state(state)
    mine = found[0]
    if isinstance(mine, Exception):
        found = [None]
    dist.broadcast_object_list(found, group_src=0, group=group)
    if isinstance(mine, Exception):
        raise mine
    if found[0] is None:
        raise RuntimeError("no costs: the first rank has failed")
    return found[0]


def medians(layers, x, repeats):
    found = []
    for layer in layers:
        twin, times = copy.deepcopy(layer), []
        for _ in range(repeats + 1):
            source = x.clone()
            if x.is_floating_point():
                source.requires_grad_()
            given = source.clone()
            start = time.perf_counter()
            y = twin(given)
            wanted = [t for t in (source, *twin.parameters()) if t.requires_grad]
            if wanted:
                torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
            times.append(time.perf_counter() - start)
        found.append(sorted(times[1:])[repeats // 2])
        x = y.detach()
    return found


def partition(costs, stages):
    count = len(costs)
    if stages < 1 or stages > count:
        raise ValueError(f"cannot make {stages} stages of {count} layers")
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"not costs: {costs}")

    def fill(limit):
        """Bounds whose stages are as full as ``limit`` allows; None if there are too many."""
        bounds, spent = [0], 0.0
        for number, cost in enumerate(costs):
            forced = count - number == stages - len(bounds) and number > bounds[-1]
            if cost > limit:
                return None
            if number > bounds[-1] and (spent + cost > limit or forced):
                bounds.append(number)
                spent = 0.0
            spent += cost
        return [*bounds, count] if len(bounds) <= stages else None

    limits = sorted({sum(costs[a:b]) for a in range(count) for b in range(a + 1, count + 1)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if fill(limits[middle] * (1 + 1e-12)) is None:
            low = middle + 1
        else:
            high = middle
    return fill(limits[low] * (1 + 1e-12))
