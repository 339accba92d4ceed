# for: 2.23
"""Written differently: positions are the first dimension, sizes are told to the collective, and the
crossing is written in steps per message."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function


class Swap(Function):
    """Rows (W·n, …): n of them to each rank, and n from each."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        each = [rows.shape[0] // dist.get_world_size(group)] * dist.get_world_size(group)
        got = rows.new_empty(rows.shape)
        dist.all_to_all_single(got, rows.contiguous(), each, each, group=group)
        return got

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, ctx.group), None


def count_of(group):
    if dist.get_rank(group) == -1:
        raise ValueError("not a member of the group")
    return dist.get_world_size(group)


def heads_for_positions(tensors, group=None):
    w = count_of(group)
    if [t.shape[1] for t in tensors if t.shape[1] % w]:
        raise ValueError("each rank needs as many heads as all others")
    each = [t.shape[1] // w for t in tensors]
    # rows by rank, then by tensor, then by head
    rows = [t.transpose(0, 1).chunk(w, 0) for t in tensors]
    parts = [part for of_rank in zip(*rows, strict=True) for part in of_rank]
    got = Swap.apply(torch.cat(parts), group)
    by_rank = [block.split(each) for block in got.chunk(w)]
    return [torch.cat(parts, 2).transpose(0, 1) for parts in zip(*by_rank, strict=True)]


def positions_for_heads(x, group=None):
    w = count_of(group)
    if x.shape[2] % w != 0:
        raise ValueError("each rank needs as many positions as all others")
    got = Swap.apply(x.permute(2, 0, 1, 3), group)  # positions first
    return torch.cat([block.permute(1, 2, 0, 3) for block in got.chunk(w)], 1)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def all_to_all_attention(q, k, v, attention=causal, group=None):
    return positions_for_heads(attention(*heads_for_positions((q, k, v), group)), group)


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
    pairs = length / 2 * length / layer.ranks
    return layer.batch * layer.heads * 4 * layer.features / layer.flops * pairs


def exchange_seconds(layer, length):
    """Both all-to-alls."""
    w, t = layer.ranks, length / layer.ranks
    heads = (layer.heads + 2 * layer.kv_heads) / w, layer.heads / w  # to one rank, each time
    one = [
        layer.alpha + layer.batch * t * layer.features * h * layer.itemsize * layer.beta
        for h in heads
    ]
    return (w - 1) * sum(one)


def all_to_all_seconds(layer, length):
    return work_seconds(layer, length) + exchange_seconds(layer, length)


def ring_seconds(layer, length):
    w = layer.ranks
    block = layer.batch * layer.kv_heads * length / w * layer.features
    sending = layer.alpha + 2 * block * layer.itemsize * layer.beta
    step = work_seconds(layer, length) / w
    return w * step + (w - 1) * max(0.0, sending - step)


def crossing(layer):
    h, g, w = layer.heads, layer.kv_heads, layer.ranks
    plain = layer.itemsize * layer.beta * layer.flops * (g * (w - 1) - h) / h  # without latency
    if plain <= 0:
        return 0.0
    lost = layer.alpha * w * w * layer.flops / (2 * layer.batch * layer.features * h)
    inside = plain * plain / 4 - lost
    return plain / 2 + math.sqrt(inside) if inside >= 0 else 0.0
