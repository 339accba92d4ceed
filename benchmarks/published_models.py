"""The models of published runs, as their sources describe them: Megatron-LM layers and Llama 3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


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


class LlamaBlock(nn.Module):
    """A layer of Llama 3.1 8B; values that are cheap to compute again are not kept for backward.

    Rotary embeddings are applied as products with tables, in the dtype of the activations.
    """

    def __init__(self, width: int = 4096, heads: int = 32, pairs: int = 8, hidden: int = 14336):
        super().__init__()
        self.heads, self.pairs, self.size = heads, pairs, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        narrow = pairs * self.size
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, rows, bias=False) for rows in (width, narrow, narrow, width)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, saved_operators())
        out: Tensor = checkpoint(
            self.layer, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return out

    def layer(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (self.q(y), self.k(y), self.v(y)))
        table = q.new_empty(q.shape[1], 1, self.size)
        q, k = q * table, k * table
        k, v = (t.repeat_interleave(self.heads // self.pairs, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Llama 3.1 8B: 8.03 billion parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128_256, 4096)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(4096), nn.Linear(4096, 128_256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1).float()


def saved_operators() -> Callable[..., CheckpointPolicy]:
    """torchtitan's selective checkpointing: attention and every second matrix product are kept."""
    seen: Counter[bool] = Counter()

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.overloadpacket.__name__
        seen[ctx.is_recompute] += name == "mm"
        keep = "attention" in name or (name == "mm" and seen[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
