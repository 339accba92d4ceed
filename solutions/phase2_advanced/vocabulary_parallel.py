"""A vocabulary shared by W ranks: embedding, output head and cross-entropy without full logits.

The largest matrix of a language model maps words to vectors, and vectors back to words. It is cut
along the vocabulary: rank r holds the rows of its own words. A lookup is a sum over the ranks, to
which all ranks but the owner add zeros. The loss of a token with logits z and target t,

    loss = log Σ_j exp(z_j - m) - (z_t - m)        m: the largest z_j

needs three numbers to which all ranks contribute: the largest logit, the sum of the exponentials
and the target's logit. For N tokens the ranks all-reduce 3N numbers. Gathering the logits would
take V·N numbers. No tensor here is larger than this rank's N·V/W logits. The gradient, softmax
minus one-hot, needs no message at all.

The vocabulary need not divide by W: rank r has the words ⌊V·r/W⌋ … ⌊V·(r+1)/W⌋-1, so two ranks
differ by one word at most. Nothing is padded, so no word that doesn't exist takes part in the
softmax.

Shapes: N tokens (any leading dimensions), D width, V words, v this rank's words.
Source: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), section 3, on the output embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group

from .tensor_parallel import copy_to_ranks, place_in, shard, sum_over_ranks

IGNORED = -100


def vocabulary_range(vocabulary: int, group: Group = None) -> tuple[int, int]:
    """(first, end) of the words that this rank holds: ⌊V·r/W⌋ and ⌊V·(r+1)/W⌋.

    Ranks differ by one word at most; the numbers are exact for any V. ValueError for fewer words
    than ranks, or if this process is not in ``group``.
    """
    # --- exercise 2.16: start
    # Step 1: the end of one rank's words is the first word of the next rank
    rank, world_size = place_in(group)
    if vocabulary < world_size:
        raise ValueError(f"a vocabulary of {vocabulary} can't be shared by {world_size} ranks")
    return vocabulary * rank // world_size, vocabulary * (rank + 1) // world_size
    # --- exercise 2.16: end


def check_words(words: Tensor, vocabulary: int, what: str) -> None:
    """Raise ValueError if a word is not in the vocabulary (the host reads from the device once)."""
    if words.numel():
        low, high = torch.stack(words.aminmax()).tolist()
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            raise ValueError(f"{what} {bad} is not in the vocabulary of {vocabulary} words")


class VocabParallelEmbedding(nn.Module):
    """An embedding of which this rank holds the words ``first`` … ``end``-1, also as output head.

    ``embedding``: the whole one, the same on all ranks; it is neither changed nor kept, and nothing
    is communicated. ``weight`` (v, D) are this rank's rows: a parameter of its own, in the dtype of
    the whole, trainable if the whole one is, without a gradient. ValueError for fewer words than
    ranks, if this process is not in ``group``, and for the options of nn.Embedding (padding_idx,
    max_norm …), which are not supported.
    """

    def __init__(self, embedding: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.group = group
        options = embedding.padding_idx, embedding.max_norm
        if options != (None, None) or embedding.scale_grad_by_freq or embedding.sparse:
            raise ValueError(f"only a plain embedding can be shared by ranks, not {embedding}")
        # --- exercise 2.16: start
        # Step 2: this rank's rows of the whole table
        self.vocabulary = embedding.num_embeddings
        self.first, self.end = vocabulary_range(self.vocabulary, group)
        self.weight = shard(embedding.weight, 0, slice(self.first, self.end))
        # --- exercise 2.16: end

    def forward(self, words_N: Tensor) -> Tensor:
        """Words (…) int64, equal on all ranks, to their vectors (…, D), equal on all ranks.

        Any shape and strides, also no words. Forward: one all-reduce of the output's bytes;
        backward: none. ValueError, before anything is sent, for a word outside the vocabulary.
        """
        # --- exercise 2.16: start
        # Step 3: number the words from this rank's first; words of other ranks take any row
        # Step 4: set those rows to zero, so that the sum over the ranks is the owner's row
        check_words(words_N, self.vocabulary, "word")
        foreign_N = (words_N < self.first) | (words_N >= self.end)
        rows_ND = F.embedding((words_N - self.first).masked_fill(foreign_N, 0), self.weight)
        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), self.group)
        # --- exercise 2.16: end

    def logits(self, x_ND: Tensor) -> Tensor:
        """The tied output head: x (…, D), equal on all ranks, to this rank's logits (…, v).

        Forward sends nothing; backward: one all-reduce of x's bytes.
        """
        # --- exercise 2.16: start
        # Step 5: a column-parallel product with the embedding's rows
        return F.linear(copy_to_ranks(x_ND, self.group), self.weight)
        # --- exercise 2.16: end


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Nv: Tensor, targets_N: Tensor, first: int, ignored: int, group: Group
    ) -> Tensor:
        # --- exercise 2.16: start
        # Step 6: subtract the largest logit of all ranks, so that no exponential overflows
        # Step 7: compute this rank's part of the sum, and the target's logit if this rank has it
        # Step 8: send both in one message; turn the exponentials into the softmax in place
        largest_N = logits_Nv.amax(-1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        exp_Nv = logits_Nv - largest_N.unsqueeze(-1)
        index_N = targets_N - first
        mine_N = (index_N >= 0) & (index_N < logits_Nv.shape[-1])
        index_N1 = index_N.masked_fill(~mine_N, 0).unsqueeze(-1)
        target_N = exp_Nv.gather(-1, index_N1).squeeze(-1).masked_fill(~mine_N, 0)
        sums_2N = torch.stack([exp_Nv.exp_().sum(-1), target_N])
        dist.all_reduce(sums_2N, group=group)
        normaliser_N, target_N = sums_2N
        uncounted_N = targets_N == ignored
        softmax_Nv = exp_Nv.div_(normaliser_N.unsqueeze(-1))
        ctx.save_for_backward(softmax_Nv, index_N1, mine_N, uncounted_N)
        return (normaliser_N.log() - target_N).masked_fill(uncounted_N, 0)
        # --- exercise 2.16: end

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.16: start
        # Step 9: (softmax - one-hot) times the loss's gradient; the target's rank has the one
        softmax_Nv, index_N1, mine_N, uncounted_N = ctx.saved_tensors
        grad_N1 = grad_N.unsqueeze(-1)
        grad_Nv = softmax_Nv * grad_N1
        grad_Nv.scatter_add_(-1, index_N1, -grad_N1.masked_fill(~mine_N.unsqueeze(-1), 0))
        return grad_Nv.masked_fill_(uncounted_N.unsqueeze(-1), 0), None, None, None, None
        # --- exercise 2.16: end


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    targets_N: Tensor,
    vocabulary: int,
    *,
    ignore_index: int = IGNORED,
    group: Group = None,
) -> Tensor:
    """The cross-entropy of each token (…), equal on all ranks, from this rank's logits (…, v).

    ``targets_N`` (…) int64, equal on all ranks: words, or ``ignore_index`` (any number). A token
    with ``ignore_index`` has loss zero and gradient zero, even if its logits are NaN. For all
    other tokens the result equals ``F.cross_entropy(…, reduction="none")`` on the whole logits
    (…, V), also where all logits of a rank are -inf. Any shape and strides, also no tokens; logits
    and targets are not changed. 16-bit logits are computed with in float32, and the result is
    float32, too; float64 stays. The gradient has the dtype of the logits.

    Forward: two all-reduces, of three numbers per token together; backward: none. Largest tensor:
    this rank's logits. ValueError, before anything is sent, for a target outside the vocabulary, if
    this process is not in ``group``, or if this rank's logits are not (…, v) for its v words. Only
    that rank notices wrong logits: an agreement would take a message.
    """
    # --- exercise 2.16: start
    # Step 10: refuse logits and targets that don't fit
    # Step 11: compute in float32 or wider: 16 bits are too few for thousands of exponentials
    first, end = vocabulary_range(vocabulary, group)
    if logits_Nv.shape != (*targets_N.shape, end - first):
        raise ValueError(
            f"logits {tuple(logits_Nv.shape)} don't belong to targets {tuple(targets_N.shape)} and "
            f"this rank's {end - first} words"
        )
    counted_N = targets_N.masked_fill(targets_N == ignore_index, 0)  # of known shape on any device
    check_words(counted_N, vocabulary, "target")
    wide_Nv = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32))
    return _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)
    # --- exercise 2.16: end
