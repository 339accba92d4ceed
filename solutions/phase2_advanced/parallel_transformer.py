"""A transformer block shared by W ranks: attention cut along its heads, the MLP along its width.

Each half of the block is a column-parallel layer, a function of each head or feature alone, and a
row-parallel layer. So each half needs one all-reduce forward, after the row-parallel layer. It
needs one backward, for the input of the column-parallel layer:

    x ─ norm ─ copy ┬─ qkv rows, heads of rank 0 ─ out columns ─┬ all-reduce ─ + x
                    └─ qkv rows, heads of rank 1 ─ out columns ─┘

Per block and rank: two all-reduces forward and two backward, of batch·time·width elements each.
That makes 8(W-1)/W·B·T·D elements sent, whatever the number of heads or the inner width. Weights,
their gradients and 12 of 16 units of activations shrink by W (exercise 2.18 has the formula). Norms
and residual stream are replicated: every rank computes all of them, with equal results.

Shapes: B batch, T time, D width, H this rank's heads of d features each.
Source: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), section 3.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    block_of,
    place_in,
)


def rows_by_rank(qkv: nn.Linear, world_size: int) -> nn.Linear:
    """The fused projection (all of q, then k, then v) with its rows in the order of the ranks.

    Block r of W holds the r-th part of q, of k and of v, in this order. So cutting the result into
    W blocks of rows gives each rank whole heads of all three. It is a new layer with parameters of
    its own, in the same dtype, with or without a bias. Each parameter is trainable where that of
    ``qkv`` is; ``qkv`` is not changed.
    """
    # --- exercise 2.17: start
    # Step 1: a row's index is (q/k/v, rank, row); put the rank first
    ordered = copy.deepcopy(qkv)
    for p in ordered.parameters():
        by_part = p.detach().unflatten(0, (3, world_size, -1))
        p.data = by_part.transpose(0, 1).flatten(0, 2)
    return ordered
    # --- exercise 2.17: end


class ParallelBlock(nn.Module):
    """This rank's share of a pre-norm transformer block; same names of parameters as the whole one.

    ``block`` is the whole one, the same on all ranks, with causal attention and GELU. It has
    ``heads``, ``norm_attention`` and ``norm_mlp`` (nn.LayerNorm), and the linear layers ``qkv``
    (D → 3D, fused), ``out`` (D → D), ``up`` and ``down``, with or without bias. The share is a
    copy; ``block`` is neither changed nor kept, and nothing is communicated. Copies have the dtype
    of the whole, are trainable where it is, and have no gradient yet. ``heads`` is this rank's
    number of heads. Raises ValueError if the heads or the MLP's inner width don't divide by the
    number of ranks. Raises it, too, if the width does not divide by the heads, or if this process
    is not in ``group``.
    """

    column, row = ColumnParallelLinear, RowParallelLinear  # exercise 2.18 takes others

    def __init__(self, block: Any, group: Group = None) -> None:
        super().__init__()
        # --- exercise 2.17: start
        # Step 2: refuse a block that can't be cut: whole heads per rank, whole features per head
        # Step 3: replicate norms; the layer after one is column-parallel, the next row-parallel
        mine, width = block_of(block.heads, "heads", group), block.out.in_features
        if width % block.heads:
            raise ValueError(f"width {width} does not divide by {block.heads} heads")
        self.group, self.heads = group, mine.stop - mine.start
        self.norm_attention = copy.deepcopy(block.norm_attention)
        self.norm_mlp = copy.deepcopy(block.norm_mlp)
        self.qkv = self.column(rows_by_rank(block.qkv, place_in(group)[1]), group)
        self.out = self.row(block.out, group)
        self.up, self.down = self.column(block.up, group), self.row(block.down, group)
        # --- exercise 2.17: end

    def attention(self, x_BTD: Tensor) -> Tensor:
        """Causal self-attention of normalised x (B, T, D), by this rank's heads between borders."""
        # --- exercise 2.17: start
        # Step 4: get q, k and v of this rank's heads; each head attends alone, so send nothing
        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))
        # --- exercise 2.17: end

    def mlp(self, x_BTD: Tensor) -> Tensor:
        """GELU between two linear layers, on this rank's features of the inner width."""
        # --- exercise 2.17: start
        # Step 5: apply GELU to whole features: on terms of a sum it would be wrong
        return self.down(F.gelu(self.up(x_BTD)))
        # --- exercise 2.17: end

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same, equal on all ranks; any B and T.

        Two all-reduces of x's bytes, and two more in backward. Every gradient is that of one
        process: of a sharded parameter this rank's part, of a replicated one the whole.
        """
        # --- exercise 2.17: start
        # Step 6: two residual steps
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))
        # --- exercise 2.17: end
