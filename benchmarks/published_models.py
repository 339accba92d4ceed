"""A layer of Megatron-LM, as its source describes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class ToAll(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class FromAll(torch.autograd.Function):
    """Sum over the ranks; the gradient passes (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ShardedBlock(nn.Module):
    """A transformer layer; each of W ranks holds 1/W of the heads and of the MLP."""

    def __init__(self, width: int, heads: int, ranks: int) -> None:
        super().__init__()
        self.heads = heads // ranks
        part = width // heads * self.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * part), nn.Linear(part, width)
        self.up = nn.Linear(width, 4 * width // ranks)
        self.down = nn.Linear(4 * width // ranks, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(ToAll.apply(self.norms[0](x))).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + FromAll.apply(self.out(mixed.transpose(1, 2).flatten(2)))
        hidden = F.gelu(self.up(ToAll.apply(self.norms[1](x))))
        return x + FromAll.apply(self.down(hidden))
