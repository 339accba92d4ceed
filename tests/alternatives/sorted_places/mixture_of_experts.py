# for: 2.24
"""Written differently: experts by rounds of maxima, places by sorting and searching."""

from __future__ import annotations

import math
from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

Found = namedtuple("Found", "experts_NK weights_NK kept_NK load_E loss")


def choose(probabilities_NE, bias_E, top_k):
    scores = probabilities_NE.detach() + bias_E
    numbers = torch.arange(scores.shape[1], device=scores.device)
    found = []
    for _ in range(top_k):
        best = scores == scores.amax(1, keepdim=True)
        found.append(torch.where(best, numbers, len(numbers)).amin(1))
        scores = scores.masked_fill(numbers == found[-1].unsqueeze(1), -torch.inf)
    experts = torch.stack(found, 1)
    weights = torch.take_along_dim(probabilities_NE, experts, 1)
    if top_k == 1:
        return experts, weights
    total = weights.sum(1, keepdim=True)
    return experts, weights / torch.where(total > 0, total, torch.ones_like(total))


def keep_first(experts_NK, experts, capacity):
    queue, order = experts_NK.T.reshape(-1).sort(stable=True)
    place = torch.empty_like(queue)
    place[order] = torch.arange(len(queue), device=queue.device) - torch.searchsorted(queue, queue)
    return (place < capacity).view(experts_NK.shape[1], experts_NK.shape[0]).T


def count_choices(experts_NK, experts, group=None):
    load = torch.stack([(experts_NK == e).sum() for e in range(experts)])
    dist.all_reduce(load, group=group)
    return load


def balance_loss(probabilities_NE, load_E, top_k, group=None):
    load_E = load_E.to(probabilities_NE.dtype)
    total = load_E.sum().clamp(min=1)
    weigh = load_E / total * len(load_E)
    return (probabilities_NE @ weigh).sum() / (total / top_k) * dist.get_world_size(group)


class Router(nn.Module):
    def __init__(
        self, width, experts, *, top_k=1, capacity_factor=None, jitter=0.0, seed=0, group=None
    ):
        super().__init__()
        if dist.get_rank(group) < 0 or seed < 0 or not (0 <= jitter < 1):
            raise ValueError("bad group, seed or jitter")
        if top_k not in range(1, experts + 1):
            raise ValueError("bad top_k")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError("bad capacity factor")
        self.settings = SimpleNamespace(k=top_k, factor=capacity_factor, e=experts, group=group)
        self.jitter = jitter
        self.noise = torch.Generator().manual_seed(hash((seed, dist.get_rank(group) + 1)) % 2**63)
        generator = torch.Generator().manual_seed(hash((seed, 0)) % 2**63)
        self.weight = nn.Parameter(torch.empty(experts, width, dtype=torch.float32))
        with torch.no_grad():
            self.weight.uniform_(-0.1, 0.1, generator=generator)
        self.register_buffer("bias_E", torch.zeros(experts, dtype=torch.float32))
        self.register_buffer("counted_E", torch.zeros(experts, dtype=torch.long))

    def jittered(self, x):
        if self.jitter == 0 or not self.training:
            return x
        drawn = torch.rand(x.shape, generator=self.noise, dtype=torch.float64)
        return x * (1 + self.jitter * (2 * drawn - 1)).to(x.device, x.dtype)

    def forward(self, x):
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError("tokens of another width")
        s, flat = self.settings, x.flatten(0, -2)
        wide = torch.float64 if torch.float64 in (x.dtype, self.weight.dtype) else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = self.jittered(flat.to(wide)) @ self.weight.to(wide).T
        p = torch.softmax(logits, 1)
        chosen, weights = choose(p, self.bias_E, s.k)
        load = count_choices(chosen, s.e, s.group)
        kept = chosen >= 0
        if s.factor is not None:
            kept = keep_first(chosen, s.e, math.ceil(s.factor * s.k * len(flat) / s.e))
        if self.training:
            self.counted_E.add_(load)
        loss = balance_loss(p, load, s.k, s.group)
        return Found(chosen, weights * kept, kept, load, loss)

    def update_bias(self, rate=1e-3):
        twice = self.counted_E * self.settings.e
        self.bias_E[:] = torch.where(twice < self.counted_E.sum(), self.bias_E + rate, self.bias_E)
        self.bias_E[:] = torch.where(twice > self.counted_E.sum(), self.bias_E - rate, self.bias_E)
        self.counted_E.fill_(0)
