"""Llama's transformer: norms without a mean, grouped keys, gated layers, rotary positions.

Rotary positions are products with tables, in the dtype of the activations. Source: Grattafiori et
al. 2024 (arXiv 2407.21783), section 3.2; Touvron et al. 2023 (arXiv 2307.09288), appendix A.2.1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Causal attention of heads with ``size`` features; the keys' heads serve several queries."""
    q, k, v = (t.unflatten(-1, (-1, size)) for t in (q, k, v))
    table = q.new_empty(q.shape[1], 1, size)
    q, k = q * table, k * table
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class LlamaBlock(nn.Module):
    """One layer; ``pairs`` of keys and values serve ``heads`` of queries."""

    def __init__(self, width: int, heads: int, pairs: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.pairs, self.size = heads, pairs, width // heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        narrow = pairs * self.size
        self.q, self.k, self.v, self.out = (
            nn.Linear(width, rows, bias=False) for rows in (width, narrow, narrow, width)
        )
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.norms[0](x_BTD)
        x_BTD = x_BTD + self.out(attend(self.q(y), self.k(y), self.v(y), self.size))
        y = self.norms[1](x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder with a head of its own, whose logits are float32."""

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, pairs: int, hidden: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, pairs, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Tokens (batch, time) to logits (batch · time, vocabulary)."""
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD)).flatten(0, 1).float()
