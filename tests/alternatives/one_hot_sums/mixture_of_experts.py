# for: 2.24
"""Written differently: everything is a sum over a one-hot tensor (N, K, E), choice by choice."""

from __future__ import annotations

import collections

import torch
import torch.distributed as dist
from torch import nn

Routed = collections.namedtuple("Routed", ["experts_NK", "weights_NK", "kept_NK", "load_E", "loss"])


def hot(experts_NK, experts):
    return (experts_NK[..., None] == torch.arange(experts, device=experts_NK.device)).long()


def choose(probabilities_NE, bias_E, top_k):
    order = torch.argsort(bias_E + probabilities_NE.detach(), dim=1, descending=True, stable=True)
    chosen = order.narrow(1, 0, top_k)
    weights = (hot(chosen, len(bias_E)) * probabilities_NE[:, None]).sum(2)
    if top_k > 1:
        total = weights.sum(1)
        weights = weights / (total + (total == 0))[:, None]
    return chosen, weights


def keep_first(experts_NK, experts, capacity):
    one_NKE = hot(experts_NK, experts)
    taken, kept = one_NKE.new_zeros(experts), []
    for choice in range(experts_NK.shape[1]):
        mine = one_NKE[:, choice]
        before = mine.cumsum(0) - mine + taken
        kept.append((before * mine).sum(1) < capacity)
        taken = taken + mine.sum(0)
    return torch.stack(kept, 1)


def count_choices(experts_NK, experts, group=None):
    total = hot(experts_NK, experts).sum((0, 1))
    dist.all_reduce(total, group=group)
    return total


def balance_loss(probabilities_NE, load_E, top_k, group=None):
    tokens = (load_E.sum() / top_k).clamp_min(1).to(probabilities_NE.dtype)
    busy = load_E.to(probabilities_NE.dtype) / (tokens * top_k)
    own = (busy * probabilities_NE).sum() * len(load_E)
    return own * (dist.get_world_size(group) / tokens)


class Router(nn.Module):
    def __init__(
        self, width, experts, *, top_k=1, capacity_factor=None, jitter=0.0, seed=0, group=None
    ):
        super().__init__()
        place = dist.get_rank(group)
        wrong = [place < 0, seed < 0, not 0 < top_k < experts + 1, jitter < 0, jitter >= 1]
        if any(wrong) or (capacity_factor is not None and not capacity_factor > 0):
            raise ValueError(f"not possible: {top_k=}, {capacity_factor=}, {jitter=}, {seed=}")
        self.k, self.c, self.e, self.group = top_k, capacity_factor, experts, group
        self.eps, self.start, self.drawn = jitter, 1_000_003 * (1 + place) + 7919 * seed, 0
        fixed = torch.Generator().manual_seed(seed)
        weight = torch.rand(experts, width, generator=fixed, dtype=torch.float64) - 0.5
        self.weight = nn.Parameter(weight.float())
        self.register_buffer("bias_E", torch.zeros(experts))
        self.register_buffer("counted_E", torch.zeros(experts).long())

    def jittered(self, x):
        if self.training and self.eps:
            self.drawn += 1
            source = torch.Generator(x.device).manual_seed(self.start * 1000 + self.drawn)
            drawn = torch.rand(x.shape, generator=source, device=x.device, dtype=x.dtype)
            x = torch.lerp(x * (1 - self.eps), x * (1 + self.eps), drawn)
        return x

    def forward(self, x):
        if x.shape[-1] != self.weight.shape[-1]:
            raise ValueError(f"width {x.shape[-1]}")
        with torch.autocast(x.device.type, enabled=False):
            x = self.jittered(x.reshape(-1, x.shape[-1]) * torch.ones((1,), device=x.device))
            p = torch.einsum("nd,ed->ne", *self.same(x, self.weight)).softmax(1)
        chosen, weights = choose(p, self.bias_E, self.k)
        load = count_choices(chosen, self.e, self.group)
        room = len(x) if self.c is None else -int(-self.c * self.k * len(x) / self.e // 1)
        kept = keep_first(chosen, self.e, room)
        self.counted_E += load if self.training else 0
        loss = balance_loss(p, load, self.k, self.group)
        return Routed(chosen, weights.where(kept, 0), kept, load, loss)

    @staticmethod
    def same(x, weight):
        wide = torch.promote_types(x.dtype, weight.dtype)
        return x.to(wide), weight.to(wide)

    @torch.no_grad()
    def update_bias(self, rate=1e-3):
        mean = self.counted_E.double().sum() / self.e
        self.bias_E.sub_(rate * torch.sign(self.counted_E - mean).round())
        self.counted_E.mul_(0)
