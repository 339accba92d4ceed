# for: 2.16
"""Written differently: rows by index, the target's logit by a maximum, the softmax made again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group
from solutions.phase2_advanced.vocabulary_parallel import check_words

from .tensor_parallel import copy_to_ranks, place_in, shard, sum_over_ranks

IGNORED = -100


def vocabulary_range(vocabulary: int, group: Group = None) -> tuple[int, int]:
    place, ranks = place_in(group)
    if vocabulary < ranks:
        raise ValueError(f"there are more ranks ({ranks}) than words ({vocabulary})")
    first, end = (vocabulary * border // ranks for border in (place, place + 1))
    return (first, end)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        options = (embedding.padding_idx, embedding.max_norm)
        if options != (None, None) or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(f"only a plain embedding can be shared by ranks, not {embedding}")
        self.first, self.end = vocabulary_range(embedding.weight.shape[0], group)
        self.words = embedding.weight.shape[0]
        self.group = group
        self.weight = shard(embedding.weight, 0, slice(self.first, self.end))

    def forward(self, words_N: Tensor) -> Tensor:
        check_words(words_N, self.words, "word")
        flat_n = words_N.reshape(-1)
        (places_k,) = ((flat_n >= self.first) & (flat_n < self.end)).nonzero(as_tuple=True)
        rows_kD = self.weight.index_select(0, flat_n[places_k] - self.first)
        rows_nD = rows_kD.new_zeros(flat_n.shape[0], self.weight.shape[1])
        rows_nD = rows_nD.index_copy(0, places_k, rows_kD)
        return sum_over_ranks(rows_nD.view(*words_N.shape, self.weight.shape[1]), self.group)

    def logits(self, x_ND: Tensor) -> Tensor:
        return torch.matmul(copy_to_ranks(x_ND, self.group), self.weight.t())


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Nv: Tensor, targets_N: Tensor, first: int, ignored: int, group: Group
    ) -> Tensor:
        counted_N = targets_N != ignored
        mine_N = counted_N & (targets_N >= first) & (targets_N - first < logits_Nv.shape[-1])
        local_N1 = torch.where(mine_N, targets_N - first, 0).unsqueeze(-1)
        target_N = logits_Nv.gather(-1, local_N1).squeeze(-1)
        target_N = torch.where(mine_N, target_N, float("-inf"))
        most_2N = torch.stack([logits_Nv.max(-1).values, target_N])
        dist.all_reduce(most_2N, dist.ReduceOp.MAX, group=group)
        largest_N, target_N = most_2N
        sum_N = (logits_Nv - largest_N.unsqueeze(-1)).exp_().sum(-1)
        dist.all_reduce(sum_N, group=group)
        log_N = sum_N.log_()
        ctx.save_for_backward(logits_Nv, largest_N, log_N, counted_N, mine_N, local_N1)
        return torch.where(counted_N, log_N - (target_N - largest_N), 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_Nv, largest_N, log_N, counted_N, mine_N, local_N1 = ctx.saved_tensors
        part_Nv = logits_Nv - largest_N.unsqueeze(-1)
        part_Nv.sub_(log_N.unsqueeze(-1)).exp_()
        part_Nv.mul_(grad_N.unsqueeze(-1))
        part_Nv.scatter_add_(-1, local_N1, torch.where(mine_N, -grad_N, 0.0).unsqueeze(-1))
        part_Nv.masked_fill_(~counted_N.unsqueeze(-1), 0.0)
        return (part_Nv, None, None, None, None)


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    vocabulary: int,
    *,
    ignore_index: int = IGNORED,
    group: Group = None,
) -> Tensor:
    first, end = vocabulary_range(vocabulary, group)
    if logits_Nv.dim() == 0 or tuple(logits_Nv.shape) != (*targets_N.shape, end - first):
        raise ValueError(
            f"expected {(*targets_N.shape, end - first)} logits, got {tuple(logits_Nv.shape)}"
        )
    checked = torch.where(targets_N == ignore_index, 0, targets_N)
    check_words(checked, vocabulary, "target")
    if logits_Nv.dtype in (torch.float16, torch.bfloat16):
        logits_Nv = logits_Nv.to(torch.float32)
    return _CrossEntropy.apply(logits_Nv, targets_N, first, ignore_index, group)
