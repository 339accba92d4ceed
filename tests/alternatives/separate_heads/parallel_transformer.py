# for: 2.17
"""Written differently: one head at a time, scores by hand, the borders around whole halves."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .tensor_parallel import copy_to_ranks, place_in, sum_over_ranks


def part_of(linear, rows=None, columns=None):
    """An nn.Linear of some rows, or of some columns and the whole bias."""
    weight = linear.weight.detach()
    weight = weight[rows] if columns is None else weight[:, columns]
    part = nn.Linear(weight.shape[1], weight.shape[0], linear.bias is not None)
    part.weight = nn.Parameter(weight.clone(), linear.weight.requires_grad)
    if linear.bias is not None:
        bias = linear.bias.detach() if rows is None else linear.bias.detach()[rows]
        part.bias = nn.Parameter(bias.clone(), linear.bias.requires_grad)
    return part


def rows_by_rank(qkv, world_size):
    """Rank by rank the numbers of its rows of q, k and v."""
    numbers = torch.arange(qkv.out_features).view(3, world_size, -1)
    return part_of(qkv, rows=torch.cat([numbers[:, rank].flatten() for rank in range(world_size)]))


def copy_of(norm):
    new = nn.LayerNorm(norm.normalized_shape, norm.eps)
    for name, p in norm.named_parameters():
        setattr(new, name, nn.Parameter(p.detach().clone(), p.requires_grad))
    return new


class ParallelBlock(nn.Module):
    """Rows are picked by number."""

    def __init__(self, block, group=None):
        super().__init__()
        rank, world_size = place_in(group)
        width, inner = block.out.weight.shape[1], block.up.weight.shape[0]
        if block.heads % world_size or inner % world_size or width % block.heads:
            raise ValueError(
                f"{block.heads} heads, width {width} and {inner} don't fit on {world_size} ranks"
            )
        self.group, self.heads = group, block.heads // world_size
        self.size = width // block.heads
        mine = torch.arange(width).view(world_size, -1)[rank]
        features = torch.arange(inner).view(world_size, -1)[rank]
        self.norm_attention, self.norm_mlp = copy_of(block.norm_attention), copy_of(block.norm_mlp)
        self.qkv = part_of(block.qkv, rows=torch.cat([mine, mine + width, mine + 2 * width]))
        self.out = part_of(block.out, columns=mine)
        self.up = part_of(block.up, rows=features)
        self.down = part_of(block.down, columns=features)

    def head(self, q, k, v):
        scores = q @ k.transpose(1, 2) / math.sqrt(self.size)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

    def forward(self, x):
        fused = self.qkv(copy_to_ranks(self.norm_attention(x), self.group))
        pieces = fused.split(self.size, -1)
        n = self.heads
        heads = [self.head(pieces[h], pieces[n + h], pieces[2 * n + h]) for h in range(n)]
        term = torch.cat(heads, -1) @ self.out.weight.t()
        x = x + self.plus_bias(sum_over_ranks(term, self.group), self.out)
        inner = F.gelu(self.up(copy_to_ranks(self.norm_mlp(x), self.group)))
        total = sum_over_ranks(inner @ self.down.weight.t(), self.group)
        return x + self.plus_bias(total, self.down)

    @staticmethod
    def plus_bias(y, layer):
        return y if layer.bias is None else y + layer.bias
