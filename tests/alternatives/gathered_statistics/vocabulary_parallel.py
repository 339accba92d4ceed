# for: 2.16
"""Written differently: index tricks for the look-up, autograd and log-sum-exp for the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .tensor_parallel import copy_to_ranks, sum_over_ranks


def vocabulary_range(vocabulary, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0 or world_size > vocabulary:
        raise ValueError(f"{world_size} ranks, but only {vocabulary} words")
    borders = [vocabulary * r // world_size for r in range(world_size + 1)]
    return borders[rank], borders[rank + 1]


class VocabParallelEmbedding(nn.Module):
    """Fills the rows of its own words into zeros."""

    def __init__(self, embedding, group=None):
        super().__init__()
        odd = embedding.padding_idx is not None or embedding.max_norm is not None
        if odd or embedding.sparse or embedding.scale_grad_by_freq:
            raise ValueError("padding_idx and max_norm are not supported")
        self.group, self.words = group, embedding.num_embeddings
        self.first, self.end = vocabulary_range(self.words, group)
        rows = embedding.weight.detach()[self.first : self.end].clone()
        self.weight = nn.Parameter(rows, embedding.weight.requires_grad)

    def forward(self, words):
        if ((words < 0) | (words >= self.words)).any():
            raise ValueError(f"words must be in 0 … {self.words - 1}")
        flat = words.flatten()
        mine = ((flat >= self.first) & (flat < self.end)).nonzero().squeeze(1)
        out = self.weight.new_zeros(len(flat), self.weight.shape[1])
        out = out.index_put((mine,), self.weight[flat[mine] - self.first])
        return sum_over_ranks(out.view(*words.shape, out.shape[1]), self.group)

    def logits(self, x):
        return copy_to_ranks(x, self.group) @ self.weight.t()


def vocab_parallel_cross_entropy(logits, targets, vocabulary, *, ignore_index=-100, group=None):
    """Each rank's log-sum-exp is all that the others must know of its logits."""
    first, end = vocabulary_range(vocabulary, group)
    if tuple(logits.shape) != (*targets.shape, end - first):
        raise ValueError(f"{tuple(logits.shape)} is not {tuple(targets.shape)} by {end - first}")
    counted = targets != ignore_index
    if ((targets < 0) | (targets >= vocabulary))[counted].any():
        raise ValueError(f"targets must be in 0 … {vocabulary - 1}")
    logits = logits.masked_fill(~counted.unsqueeze(-1), 0)  # these may be NaN
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shift = logits.detach().logsumexp(-1)
    dist.all_reduce(shift, op=dist.ReduceOp.MAX, group=group)
    own = (logits - shift.unsqueeze(-1)).exp().sum(-1)
    place = targets - first
    mine = (place >= 0) & (place < end - first) & counted
    picked = logits.gather(-1, place.clamp(0, end - first - 1).unsqueeze(-1)).squeeze(-1)
    picked = (picked - shift).where(mine, torch.zeros_like(picked))
    total, target = sum_over_ranks(torch.stack([own, picked]), group)
    return (total.log() - target) * counted
