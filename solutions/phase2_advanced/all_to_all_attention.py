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
        # --- exercise 2.23: start
        # Step 1: block r goes to rank r, and block r comes from rank r
        ctx.group = group
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received
        # --- exercise 2.23: end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.23: start
        # Step 2: a block's gradient goes back to the rank that the block came from
        return _Exchange.apply(grad.contiguous(), ctx.group), None
        # --- exercise 2.23: end


def heads_for_positions(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """All positions (B, h/W, T, d) of this rank's heads, from its positions (B, h, t, d) of all.

    Rank r gets the r-th part of the heads of each tensor. Positions are in the order of the ranks.
    The tensors differ in their number of heads only. One all-to-all forward and one backward for
    all tensors together. Any strides, and any dtype that the group's backend sends. Raises
    ValueError, before anything is sent, if W does not divide the heads of a tensor, or if this
    process is not in ``group``.
    """
    # --- exercise 2.23: start
    # Step 3: refuse heads that don't divide. Cut the heads of each tensor into W parts
    # Step 4: one message: join the parts of all tensors for a rank, and put ranks first
    # Step 5: what came is cut by ranks of positions: put these beside the positions
    rank_in(group)
    world_size = dist.get_world_size(group)
    for tensor in tensors:
        if tensor.shape[1] % world_size:
            raise ValueError(f"{tensor.shape[1]} heads do not divide by {world_size} ranks")
    parts = [tensor.unflatten(1, (world_size, -1)) for tensor in tensors]
    blocks = torch.cat(parts, 2).transpose(0, 1).contiguous()  # (W, B, heads, t, d)
    whole = _Exchange.apply(blocks, group).movedim(0, 2).flatten(2, 3)
    return list(whole.split([part.shape[2] for part in parts], 1))
    # --- exercise 2.23: end


def positions_for_heads(x: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, W·h, T/W, d) of all heads, from all positions (B, h, T, d) of its.

    The inverse of ``heads_for_positions``. One all-to-all forward and one backward. Any strides,
    and any dtype that the group's backend sends. Raises ValueError, before anything is sent, if W
    does not divide T, or if this process is not in ``group``.
    """
    # --- exercise 2.23: start
    # Step 6: the same way back: cut the positions, exchange, put the ranks beside the heads
    rank_in(group)
    world_size = dist.get_world_size(group)
    if x.shape[2] % world_size:
        raise ValueError(f"{x.shape[2]} positions do not divide by {world_size} ranks")
    blocks = x.unflatten(2, (world_size, -1)).movedim(2, 0).contiguous()
    return _Exchange.apply(blocks, group).transpose(0, 1).flatten(1, 2)
    # --- exercise 2.23: end


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
    # --- exercise 2.23: start
    # Step 7: exchange, attend, exchange back
    q, k, v = heads_for_positions((q, k, v), group)
    return positions_for_heads(attention(q, k, v), group)
    # --- exercise 2.23: end


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
    # --- exercise 2.23: start
    # Step 8: the same for both ways
    pairs = layer.batch * layer.heads * length**2 / 2 / layer.ranks
    return 4 * layer.features * pairs / layer.flops
    # --- exercise 2.23: end


def all_to_all_seconds(layer: Layer, length: int) -> float:
    """Forward of exercise 2.23: the all-to-all before the work, the work, and the one after it.

    An all-to-all takes (W-1)·α, and β for each byte that a rank sends.
    """
    # --- exercise 2.23: start
    # Step 9: nothing travels while the rank works
    others, positions = layer.ranks - 1, length / layer.ranks
    numbers = layer.batch * positions * layer.features * 2 * (layer.heads + layer.kv_heads)
    sent = others / layer.ranks * numbers * layer.itemsize
    return work_seconds(layer, length) + 2 * others * layer.alpha + sent * layer.beta
    # --- exercise 2.23: end


def ring_seconds(layer: Layer, length: int) -> float:
    """Forward of exercise 2.22: W steps of equal work; W-1 messages travel during the first W-1."""
    # --- exercise 2.23: start
    # Step 10: a step takes as long as its work or its message, whichever is longer
    numbers = 2 * layer.batch * layer.kv_heads * length / layer.ranks * layer.features
    message = layer.alpha + numbers * layer.itemsize * layer.beta
    step = work_seconds(layer, length) / layer.ranks
    return (layer.ranks - 1) * max(step, message) + step
    # --- exercise 2.23: end


def crossing(layer: Layer) -> float:
    """The length T from which on the ring is never slower; 0 if it is slower at no length.

    Without latency: itemsize·beta·flops·(G·(W-1) - H)/H, so 0 if W is 1 + H/G or less.
    """
    # --- exercise 2.23: start
    # Step 11: where a message takes longer than its step, (ring - all-to-all)/(W-1) is
    #          linear·T - square·T² - alpha. The larger root is the crossing, if it is positive
    w, sent = layer.ranks, layer.batch * layer.features * layer.itemsize * layer.beta
    square = 2 * layer.batch * layer.features * layer.heads / w**2 / layer.flops
    linear = 2 * sent * max(0.0, layer.kv_heads / w - (layer.heads + layer.kv_heads) / w**2)
    under = linear**2 - 4 * square * layer.alpha
    return 0.0 if under < 0 else (linear + math.sqrt(under)) / (2 * square)
    # --- exercise 2.23: end
