# for: 2.23
"""Written differently: a flat vector for each rank, one node of autograd for all tensors, and the
roots of a polynomial."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F


def send(flat, group):
    received = torch.zeros_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    return received


def heads_away(tensors, group, count):
    rows = [torch.cat([t.chunk(count, 1)[r].flatten() for t in tensors]) for r in range(count)]
    received, at, found = send(torch.stack(rows), group), 0, []
    for t in tensors:
        b, heads, positions, d = t.shape
        size = t.numel() // count
        blocks = received[:, at : at + size].split(1)
        found.append(torch.cat([x.view(b, heads // count, positions, d) for x in blocks], 2))
        at += size
    return found


def heads_home(tensors, group, count):
    rows = [torch.cat([t.chunk(count, 2)[r].flatten() for t in tensors]) for r in range(count)]
    received, at, found = send(torch.stack(rows), group), 0, []
    for t in tensors:
        b, heads, positions, d = t.shape
        size = t.numel() // count
        blocks = received[:, at : at + size].split(1)
        found.append(torch.cat([x.view(b, heads, positions // count, d) for x in blocks], 1))
        at += size
    return found


class Away(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, count, *tensors):
        ctx.group, ctx.count = group, count
        return tuple(heads_away(tensors, group, count))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *heads_home(grads, ctx.group, ctx.count)


class Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, count, x):
        ctx.group, ctx.count = group, count
        return heads_home([x], group, count)[0]

    @staticmethod
    def backward(ctx, grad):
        return None, None, *heads_away([grad], ctx.group, ctx.count)


def size_of(group):
    if dist.get_rank(group) < 0:
        raise ValueError("this process is outside of the group")
    return dist.get_world_size(group)


def heads_for_positions(tensors, group=None):
    count = size_of(group)
    if any(t.shape[1] % count for t in tensors):
        raise ValueError(f"heads {[t.shape[1] for t in tensors]} on {count} ranks")
    return [*Away.apply(group, count, *tensors)]


def positions_for_heads(x, group=None):
    count = size_of(group)
    if x.shape[2] % count:
        raise ValueError(f"{x.shape[2]} positions on {count} ranks")
    return Home.apply(group, count, x)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def all_to_all_attention(q, k, v, attention=causal, group=None):
    whole = heads_for_positions([q, k, v], group)
    return positions_for_heads(attention(*whole), group)


@dataclass(frozen=True, kw_only=True)
class Layer:
    batch: int
    heads: int
    kv_heads: int
    features: int
    itemsize: int
    ranks: int
    flops: float
    alpha: float
    beta: float


def work_seconds(layer, length):
    flops = 2 * layer.features * layer.batch * layer.heads * length * length
    return flops / (layer.ranks * layer.flops)


def all_to_all_seconds(layer, length):
    share = (layer.ranks - 1) / layer.ranks
    heads = 2 * layer.heads + 2 * layer.kv_heads
    nbytes = layer.itemsize * layer.batch * length / layer.ranks * layer.features * heads
    exchange = 2 * (layer.ranks - 1) * layer.alpha + share * nbytes * layer.beta
    return exchange + work_seconds(layer, length)


def ring_seconds(layer, length):
    nbytes = 2 * layer.itemsize * layer.batch * layer.kv_heads * layer.features * length
    message = layer.alpha + nbytes / layer.ranks * layer.beta
    step = work_seconds(layer, length) / layer.ranks
    return step + sum(max(step, message) for _ in range(layer.ranks - 1))


def crossing(layer):
    unit, squared = 2 * layer.batch * layer.features, layer.ranks**2
    excess = layer.kv_heads * (layer.ranks - 1) - layer.heads
    if excess <= 0:
        return 0.0
    slope = unit * layer.itemsize * layer.beta * excess / squared
    roots = np.roots([-unit * layer.heads / squared / layer.flops, slope, -layer.alpha])
    return float(max((root.real for root in roots if np.isreal(root)), default=0.0))
