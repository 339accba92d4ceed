"""The layers of a GPT on a mesh: those of phase 2, for tensor, context and expert axis together.

Each axis cuts another dimension, so a layer can be cut by all three:

    tensor     heads and inner features           all-reduces at the borders of a layer (2.17, 2.18)
    context    the positions of each sequence     keys and values go round within attention (2.22)
    expert     the experts of a mixture           tokens travel to their experts and back (2.25)

Two details make them fit. The fused projection has its rows by head here: q, k and v of head 0,
then those of head 1. So the rows of a rank follow one another, whatever the number of ranks, and
another axis can cut them again. And the tensor ranks cut the inner features of each expert. All of
them send the same tokens to the experts of their own line, and get terms of a sum. So they need one
all-reduce for the whole mixture, and each has one term of the router's gradient.

Shapes: B batch, T this rank's positions, D width, h this rank's heads of d features each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from solutions.phase2_advanced.context_parallel import own_positions, ring_attention
from solutions.phase2_advanced.expert_parallel import ExpertParallel
from solutions.phase2_advanced.mixture_of_experts import Router
from solutions.phase2_advanced.model_parallel import Embed
from solutions.phase2_advanced.parallel_gpt import Groups, ParallelEmbed
from solutions.phase2_advanced.parallel_transformer import ParallelBlock, rows_by_rank
from solutions.phase2_advanced.sequence_parallel import (
    TIME,
    SequenceColumnLinear,
    SequenceRowLinear,
    gather_sequence,
    scatter_sequence,
)
from solutions.phase2_advanced.tensor_parallel import (
    block_of,
    copy_to_ranks,
    split_to_ranks,
    sum_over_ranks,
)

from .mixture_gpt import Mixture, MixtureBlock


@dataclass(frozen=True)
class MeshGroups(Groups):
    """This rank's groups; ``data``: all ranks with other samples or positions, for the loss."""

    context: dist.ProcessGroup
    expert: dist.ProcessGroup


def positions_of(length: int, group: dist.ProcessGroup) -> Tensor:
    """The positions of a sequence of ``length`` that this rank of the context group has."""
    if group.size() == 1:
        return torch.arange(length)
    return own_positions([length], group.rank(), group.size())


class MeshEmbed(ParallelEmbed):
    """First layer: this rank's positions of the tokens (B, T) to (B, T, D)."""

    def __init__(self, embed: Embed, groups: MeshGroups, sequence_parallel: bool) -> None:
        super().__init__(embed, groups.tensor, sequence_parallel)
        self.context = groups.context

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Each token's embedding plus that of its position in the whole sequence."""
        positions_T = positions_of(tokens_BT.shape[TIME] * self.context.size(), self.context)
        x_BTD = self.tokens(tokens_BT) + self.places(positions_T.to(tokens_BT.device))
        return split_to_ranks(x_BTD, TIME, self.group) if self.sequence_parallel else x_BTD


def by_head(block: nn.Module) -> nn.Linear:
    """The fused projection of a whole block with its rows by head: (H, 3, d)."""
    return rows_by_rank(block.qkv, block.heads)


def share_of(mixture: Mixture, groups: MeshGroups) -> ExpertParallel:
    """This rank's experts, and of each the inner features of this tensor rank.

    Tokens travel along the expert axis. The load is that of the whole batch, as in one process.
    """
    experts, width = mixture.router.weight.shape
    inner = block_of(mixture.up.shape[-1], "features of an expert", groups.tensor)
    router = Router(width, experts, top_k=mixture.router.top_k, group=groups.expert)
    router.weight = nn.Parameter(mixture.router.weight.detach().clone())
    router.bias_E = mixture.router.bias_E.clone()
    share = ExpertParallel(router, mixture.up[..., inner], mixture.down[:, inner])
    router.group = groups.data  # after the experts have taken its group for their own
    return share.to(mixture.up.device)


class MeshBlock(ParallelBlock):
    """This rank's share of a block, on the positions that its context rank has."""

    def __init__(self, block: nn.Module, groups: MeshGroups) -> None:
        super().__init__(block, groups.tensor)
        self.context, self.experts = groups.context, None
        self.qkv = self.column(by_head(block), groups.tensor)
        if isinstance(block, MixtureBlock):
            self.norm_experts = copy.deepcopy(block.norm_experts)
            self.experts = share_of(block.experts, groups)

    def attention(self, x_BTD: Tensor) -> Tensor:
        """Causal self-attention of normalised x to the positions of all context ranks."""
        qkv_BTh3d = self.qkv(x_BTD).unflatten(-1, (self.heads, 3, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv_BTh3d.unbind(-2))
        if self.context.size() > 1:
            mixed_BhTd = ring_attention(q, k, v, group=self.context)
        else:
            mixed_BhTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed_BhTd.transpose(1, 2).flatten(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same, equal on all ranks of the tensor group."""
        x_BTD = super().forward(x_BTD)
        if self.experts is None:
            return x_BTD
        terms_BTD, _ = self.experts(self.enter(self.norm_experts(x_BTD)))
        return x_BTD + self.leave(terms_BTD)

    def enter(self, x_BTD: Tensor) -> Tensor:
        """What goes into the experts: the tensor ranks use it for different features."""
        return copy_to_ranks(x_BTD, self.group)

    def leave(self, terms_BTD: Tensor) -> Tensor:
        """What comes from them: the sum of the tensor ranks' terms."""
        return sum_over_ranks(terms_BTD, self.group)


class SequenceMeshBlock(MeshBlock):
    """A ``MeshBlock`` from and to the positions of this tensor rank (2.18)."""

    column, row = SequenceColumnLinear, SequenceRowLinear

    def enter(self, x_BtD: Tensor) -> Tensor:
        """All positions of this context rank."""
        return gather_sequence(x_BtD, self.group)

    def leave(self, terms_BTD: Tensor) -> Tensor:
        """This tensor rank's positions of the sum."""
        return scatter_sequence(terms_BTD, self.group)
