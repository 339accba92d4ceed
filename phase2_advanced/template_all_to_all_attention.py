# Exercises 2.23: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.23
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""All-to-all attention: ranks exchange positions for heads, attend, and exchange back.

Heads don't see each other. So a rank that has t = T/W positions of all heads can give them away for
all T positions of H/W heads. Then it runs any attention on whole sequences, without a message:

    (B, H, t, d)  ── all-to-all ──  (B, H/W, T, d)  attention  ── all-to-all ──  (B, H, t, d)

Two all-to-alls forward, one for q, k and v together and one for the result; two backward:

    (W-1)/W · B·t·d·(2H + 2G) numbers forward, and as many backward

The backward of an all-to-all is the all-to-all in the other direction. The ring of exercise 2.22
sends (W-1)·2·B·G·t·d numbers forward: more if W > 1 + H/G. But its messages travel while the rank
works, and here work begins when the exchange has ended. So from some length on the ring is faster.

Shapes: B batch, H heads, G heads of keys and values, T positions, t = T/W of a rank, d features.
Source: Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from given.agreement import Group, rank_in

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Group) -> Tensor:
        # Step 1: block r goes to rank r, and block r comes from rank r
        raise NotImplementedError("exercise 2.23")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Step 2: a block's gradient goes back to the rank that the block came from
        raise NotImplementedError("exercise 2.23")


def heads_for_positions(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """All positions (B, h/W, T, d) of this rank's heads, from its positions (B, h, t, d) of all.

    Rank r gets the r-th part of the heads of each tensor. Positions are in the order of the ranks.
    The tensors differ in their number of heads only. One all-to-all forward and one backward for
    all tensors together. Any strides, and any dtype that the group's backend sends. Raises
    ValueError, before anything is sent, if W does not divide the heads of a tensor, or if this
    process is not in ``group``.
    """
    # Step 3: refuse heads that don't divide. Cut the heads of each tensor into W parts
    # Step 4: one message: join the parts of all tensors for a rank, and put ranks first
    # Step 5: what came is cut by ranks of positions: put these beside the positions
    raise NotImplementedError("exercise 2.23")


def positions_for_heads(x: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, W·h, T/W, d) of all heads, from all positions (B, h, T, d) of its.

    The inverse of ``heads_for_positions``. One all-to-all forward and one backward. Any strides,
    and any dtype that the group's backend sends. Raises ValueError, before anything is sent, if W
    does not divide T, or if this process is not in ``group``.
    """
    # Step 6: the same way back: cut the positions, exchange, put the ranks beside the heads
    raise NotImplementedError("exercise 2.23")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to whole sequences; G heads of k and v for H of q."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention = causal, group: Group = None
) -> Tensor:
    """``attention`` to whole sequences, for this rank's positions (B, H, t, d) of all heads.

    Rank r has the r-th part of the positions. ``k`` and ``v`` are (B, G, t, d). ``attention`` sees
    H/W heads of q and G/W of k and v, at all T positions. It may be any function that treats heads
    alike: with a mask of documents, or without one. Result and gradients are those of one process.
    Two all-to-alls forward and two backward, (W-1)/W·B·t·d·(2H + 2G) numbers each way. Raises
    ValueError as ``heads_for_positions`` does.
    """
    # Step 7: exchange, attend, exchange back
    raise NotImplementedError("exercise 2.23")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One causal attention over ``ranks`` ranks, and the machine that it runs on.

    ``itemsize``: bytes per number. ``flops``: per second. ``alpha``: seconds per message, ``beta``:
    seconds per byte.
    """

    batch: int
    heads: int
    kv_heads: int
    features: int
    itemsize: int
    ranks: int
    flops: float
    alpha: float
    beta: float


def work_seconds(layer: Layer, length: int) -> float:
    """One rank's products forward: T²/2 pairs, 4·d FLOPs each, for B·H heads over W ranks."""
    # Step 8: the same for both ways
    raise NotImplementedError("exercise 2.23")


def all_to_all_seconds(layer: Layer, length: int) -> float:
    """Forward of exercise 2.23: the all-to-all before the work, the work, and the one after it.

    An all-to-all takes (W-1)·α, and β for each byte that a rank sends.
    """
    # Step 9: nothing travels while the rank works
    raise NotImplementedError("exercise 2.23")


def ring_seconds(layer: Layer, length: int) -> float:
    """Forward of exercise 2.22: W steps of equal work; W-1 messages travel during the first W-1."""
    # Step 10: a step takes as long as its work or its message, whichever is longer
    raise NotImplementedError("exercise 2.23")


def crossing(layer: Layer) -> float:
    """The length T from which on the ring is never slower; 0 if it is slower at no length.

    Without latency: itemsize·beta·flops·(G·(W-1) - H)/H, so 0 if W is 1 + H/G or less.
    """
    # Step 11: where a message takes longer than its step, (ring - all-to-all)/(W-1) is
    #          linear·T - square·T² - alpha. The larger root is the crossing, if it is positive
    raise NotImplementedError("exercise 2.23")
