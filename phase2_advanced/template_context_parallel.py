# Exercises 2.22: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.22
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Ring attention: each rank has T/W positions of a sequence, also for attention.

Each rank keeps the queries of its own positions. Blocks of keys and values go round the ring. A
rank sends on the block that it has, and computes with it meanwhile. A partial result over some keys
is their weighted mean of values, and the logarithm of the sum of its weights. Two such pairs are
enough to compute the pair over both sets of keys, so no rank ever needs all keys at once:

    L = log(e^L1 + e^L2),   out = e^(L1 - L)·out1 + e^(L2 - L)·out2

Backward computes the weights again from L, block by block. The gradients of keys and values
travel on one step behind the block, and every rank adds its term:

    forward     (W-1)·2·B·G·t·d numbers, in W-1 messages
    backward    twice as many numbers and messages; the gradients' numbers have 4 bytes or 8

With a causal mask early positions have few keys and late ones many. Each document is therefore cut
into 2W chunks, and rank r gets the chunks r and 2W-1-r. So all ranks multiply (2W+1)·c² pairs of
positions, for a chunk of c: half of the 4W·c² pairs without a mask, and half a chunk's share more.

Documents stand one after another, and none sees another. Each is padded at its end until 2W divides
it. No real position sees the padding, because it comes later.

Shapes: B batch, H heads, G heads of keys and values, t = T/W positions of a rank, d features.
Sources: Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889), section 3. Milakov & Gimelshein 2018 (online
softmax, arXiv 1805.02867), section 3. Dao et al. 2022 (arXiv 2205.14135), appendix B.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from given.agreement import Group, rank_in
from given.attention_parts import Part, tiles, wide


def chunk_sizes(lengths: Sequence[int], world_size: int) -> list[int]:
    """The positions in a chunk of each document: a 2W-th of its length, rounded up.

    Raises ValueError if a length is less than 1.
    """
    if any(length < 1 for length in lengths):
        raise ValueError(f"a document has at least one position, got the lengths {[*lengths]}")
    return [-(-length // (2 * world_size)) for length in lengths]


def own_positions(lengths: Sequence[int], rank: int, world_size: int) -> Tensor:
    """The t positions of ``rank``, as int64: for each document first chunk ``rank``, then 2W-1-r.

    Positions count through all documents, which stand one after another without padding. Padding is
    -1. ``x[:, own_positions(…)]`` takes the rows of a rank, and some row for padding.
    """
    # Step 1: number the positions within a document first; those past its end are padding
    raise NotImplementedError("exercise 2.22")


def visible(rank: int, source: int, sizes: Sequence[int]) -> list[Part]:
    """The parts of own queries and of the keys of ``source`` that have to be multiplied.

    Slices count a rank's positions; ``sizes`` are those of the documents' chunks. Each pair of
    positions that the causal mask lets through is in one part. In a part with True, the last query
    sees all keys, and each query before it one key less. In a part with False, all see all.
    """
    # Step 2: from an earlier rank, only the first chunk is early enough, for both of ours. From a
    #         later rank, both chunks are, but for our second chunk only
    raise NotImplementedError("exercise 2.22")


def scores(q: Tensor, k: Tensor, masked: bool, scale: float) -> Tensor:
    """The products of all queries with all keys, times ``scale``; -inf where ``masked`` hides."""
    # Step 3: scale the queries, which are fewer than their scores. The mask hides a triangle in the
    #         last keys, as many as there are queries
    raise NotImplementedError("exercise 2.22")


def attend(q: Tensor, k: Tensor, v: Tensor, masked: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to some keys: (mean of values (…, t, d), log of the sum of weights (…, t, 1)).

    Every query sees one key at least. Exact for scores of any size: no weight overflows.
    """
    # Step 4: subtract each query's largest score, then take exponentials. Divide the product by the
    #         sum, not the weights: that is less to divide
    raise NotImplementedError("exercise 2.22")


def merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Change ``out`` and ``lse`` in place to attention to the keys of both pairs.

    One of the pairs may be over no keys: its ``lse`` is -inf, and its ``out`` any finite number.
    """
    # Step 5: both weights are at most 1, so nothing overflows
    raise NotImplementedError("exercise 2.22")


def gradients(
    q: Tensor, grad: Tensor, lse: Tensor, rest: Tensor, k: Tensor, v: Tensor, masked: bool, s: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: what the queries' attention to these keys adds to them.

    ``lse`` is over all keys, and ``rest`` is Σ grad·out of each query. Heads that share keys are in
    dimension 2, and their gradients of k and v are summed.
    """
    # Step 6: the weights are e^(score - lse), and a score's gradient is weight·(grad·v - rest)
    raise NotImplementedError("exercise 2.22")


def start_pass(block: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to send ``block`` to the right and to receive the left one: a function that waits.

    The function returns the block of the left neighbour, in memory of its own.
    """
    # Step 7: one batch of both, or NCCL runs one after the other, and all ranks wait
    raise NotImplementedError("exercise 2.22")


def around(block: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """(rank, its block) for all ranks of ``group``: first the own one, then from left to left.

    The next block travels while the caller works with this one. W-1 messages per rank.
    """
    # Step 8: start, yield, wait; the last block goes no further
    raise NotImplementedError("exercise 2.22")


class _RingAttention(Function):
    """q (B, G, H/G, t, d), k and v (B, G, 1, t, d): a head of k belongs to H/G heads of q."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], scale: float, group: Group
    ) -> Tensor:
        # Step 9: begin with no keys; for each block, merge each tile of each visible part into its
        #         queries. Keep the result and L for backward, but no block and no weights
        raise NotImplementedError("exercise 2.22")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Step 10: keep the gradients of the own block here. Those of another rank's block: add
        #          what the left neighbour sent, and send the sum on. The last sum to come is ours
        raise NotImplementedError("exercise 2.22")


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    scale: float | None = None,
    group: Group = None,
) -> Tensor:
    """Causal attention of this rank's queries (B, H, t, d) to the keys of all ranks before them.

    ``k`` and ``v`` are (B, G, t, d); G divides H, and a head of ``k`` belongs to H/G heads that
    follow one another. Row i of a rank is the position ``own_positions(lengths, …)[i]``. No
    document of ``lengths`` sees another; None means one document of W·t positions. ``scale`` is
    1/√d unless given. Any strides.

    Result and gradients are those of one process, in the dtype of the arguments. 16-bit numbers are
    multiplied and summed in float32, also under autocast. Results of padding mean nothing; if they
    get no gradients, they change none.

    A rank multiplies at most (2W+2)·c² pairs of positions per document and head: each pair twice
    forward and five times backward. Forward it sends k and v in W-1 messages, all to its right
    neighbour. Backward it sends these again, and W-1 messages with their gradients in float32 or
    float64. It does not send gradients that neither k nor v needs. A block travels while the rank
    works with another. Kept for backward are arguments, result and one number per query. A
    rank's memory grows with t, not with W.

    All ranks of ``group`` pass the same shapes and lengths, and need the same gradients. Raises
    ValueError, before anything is sent, if shapes, dtypes and lengths don't fit one another, or if
    this process is not in ``group``.
    """
    rank_in(group)
    world_size, heads = dist.get_world_size(group), k.shape[1] if k.ndim == 4 else 0
    fits = q.ndim == 4 and heads > 0 and k.shape == v.shape and q.shape[1] % heads == 0
    if not fits or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"queries {[*q.shape]} do not fit keys {[*k.shape]}, values {[*v.shape]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"one floating-point dtype for all, not {q.dtype}, {k.dtype}, {v.dtype}")
    sizes = chunk_sizes([world_size * q.shape[2]] if lengths is None else lengths, world_size)
    if 2 * sum(sizes) != q.shape[2]:
        raise ValueError(f"{q.shape[2]} positions, but the documents give {2 * sum(sizes)}")
    # Step 11: give queries a dimension for the heads that share keys, and take it away at the end
    raise NotImplementedError("exercise 2.22")
