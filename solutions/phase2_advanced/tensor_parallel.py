"""Tensor parallelism: one matrix product shared by W ranks, forward and backward.

A layer that is too large (or too slow) for one rank is cut along its features. Every rank computes
a share of the product, and the ranks communicate at the borders of the layer. Each of these
communications comes as a pair: its forward determines its backward.

==================  ===========  ===========  ==================================================
function            forward      backward     for
==================  ===========  ===========  ==================================================
copy_to_ranks       identity     all-reduce   each rank uses the same x for something else
sum_over_ranks      all-reduce   identity     x is a sum of which each rank has one term
split_to_ranks      own block    all-gather   each rank goes on with its block of the same x
gather_from_ranks   all-gather   own block    all ranks need all blocks, for the same thing
==================  ===========  ===========  ==================================================

A column-parallel layer (blocks of output features) followed by a row-parallel one (blocks of input
features) needs no message in between: one all-reduce forward, one backward. Per rank an all-reduce
of N bytes sends 2(W-1)/W·N bytes, an all-gather to N bytes (W-1)/W·N. Invariant: a replicated
tensor is equal on all ranks, and so is its gradient. The shards of a sharded tensor, put together,
are the tensor that one process would have.

Shapes: N tokens (any leading dimensions), D inputs, F outputs; a small letter is this rank's share
of the dimension: weight_fD has F/W rows.
Sources: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), section 3; Narayanan et al. 2021
(arXiv 2104.04473), section 2.3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group


def place_in(group: Group) -> tuple[int, int]:
    """(this rank's number in ``group``, the group's size); ValueError outside of the group."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the group that was given")
    return rank, world_size


def block_of(size: int, what: str, group: Group) -> slice:
    """This rank's block of ``size`` things; ValueError if the ranks can't have equal blocks."""
    rank, world_size = place_in(group)
    if size % world_size:
        raise ValueError(f"{size} {what} can't be divided evenly among {world_size} ranks")
    share = size // world_size
    return slice(rank * share, (rank + 1) * share)


# -- the conjugate pair -------------------------------------------------------------------------
class _CopyToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        # --- exercise 2.14: start
        # Step 1: send nothing, all ranks have x already; autograd needs a tensor of its own
        ctx.group = group
        return x.view_as(x)
        # --- exercise 2.14: end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.14: start
        # Step 2: all ranks used x, so its gradient is the sum over all ranks: call the other
        #         function of the pair
        return sum_over_ranks(grad, ctx.group), None
        # --- exercise 2.14: end


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        # --- exercise 2.14: start
        # Step 3: reduce a contiguous copy: a collective writes into its argument, but neither the
        #         caller's tensor nor a gradient that autograd hands out may change
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
        # --- exercise 2.14: end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.14: start
        # Step 4: every term of a sum has the gradient of the sum, and every rank has that already
        return copy_to_ranks(grad, ctx.group), None
        # --- exercise 2.14: end


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    """``x``, which is equal on all ranks; its gradient is the sum of all ranks' gradients.

    Megatron-LM's f. Any shape, strides and dtype. Forward sends nothing; backward sends the bytes
    of one all-reduce of x. The gradient that comes in is not changed, and nothing is kept for
    backward. The ranks of ``group`` run forward and backward alike, as often as they like, also
    several backwards through one graph. ValueError if this process is not in ``group``.
    """
    # --- exercise 2.14: start
    # Step 5: refuse a process outside of the group: for it a collective would silently do nothing
    place_in(group)
    return _CopyToRanks.apply(x, group)
    # --- exercise 2.14: end


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    """The sum of all ranks' ``x`` (same shape and dtype) as a new contiguous tensor.

    Megatron-LM's g. Any shape, strides and dtype, also integers; ``x`` is not changed. Its gradient
    is the sum's. Forward sends the bytes of one all-reduce of x; backward sends nothing. Nothing is
    kept for backward. ValueError if this process is not in ``group``.
    """
    # --- exercise 2.14: start
    # Step 6: refuse as in step 5
    place_in(group)
    return _SumOverRanks.apply(x, group)
    # --- exercise 2.14: end


# -- linear layers ------------------------------------------------------------------------------
def cut(x: Tensor, dim: int, block: slice) -> Tensor:
    """The ``block`` of ``x`` along ``dim``, contiguous and in memory of its own."""
    # --- exercise 2.15: start
    # Step 1: a copy: a view would keep all of x in memory
    part = x.narrow(dim, block.start, block.stop - block.start)
    return part.clone(memory_format=torch.contiguous_format)
    # --- exercise 2.15: end


class _SplitToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, block: slice, group: Group) -> Tensor:
        # --- exercise 2.15: start
        # Step 2: this rank's block
        ctx.dim, ctx.group = dim, group
        return cut(x, dim, block)
        # --- exercise 2.15: end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.15: start
        # Step 3: each rank has the gradient of its block only; the whole x needs all of them
        return gather_from_ranks(grad, ctx.dim, ctx.group), None, None, None
        # --- exercise 2.15: end


class _GatherFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        # --- exercise 2.15: start
        # Step 4: all-gather contiguous blocks rank after rank, then put them together along dim
        ctx.dim, ctx.group = dim, group
        world_size = dist.get_world_size(group)
        x = x.contiguous()
        blocks = x.new_empty(world_size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(blocks, x, group=group)
        return torch.cat(blocks.chunk(world_size), dim)
        # --- exercise 2.15: end

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.15: start
        # Step 5: all ranks use the whole in the same way, so all have its gradient: take a block
        return split_to_ranks(grad, ctx.dim, ctx.group), None, None
        # --- exercise 2.15: end


def split_to_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's block of ``x`` along ``dim``, a contiguous copy; ``x`` is equal on all ranks.

    Any dtype and strides; ``dim`` may be negative. Its gradient is whole on every rank. Forward
    sends nothing; backward: one all-gather of the blocks' gradients. ValueError if the dimension
    does not divide, or if this process is not in ``group``.
    """
    # --- exercise 2.15: start
    # Step 6: find this rank's block before anything is sent: it refuses what does not divide
    return _SplitToRanks.apply(x, dim, block_of(x.shape[dim], "elements", group), group)
    # --- exercise 2.15: end


def gather_from_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """The ranks' ``x`` (of one shape) put together along ``dim``, in rank order, contiguous.

    For a whole that all ranks use in the same way: the gradient of ``x`` is this rank's block of
    the whole's gradient, without communication. Forward: one all-gather. Any dtype and strides;
    ``dim`` may be negative. ValueError if this process is not in ``group``.
    """
    place_in(group)
    return _GatherFromRanks.apply(x, dim, group)


def shard(full: Tensor, dim: int, block: slice) -> nn.Parameter:
    """The ``block`` of a parameter along ``dim``, as a parameter; trainable if the whole is."""
    return nn.Parameter(cut(full.detach(), dim, block), full.requires_grad)


def check_width(x: Tensor, width: int, layer: nn.Module) -> None:
    """Raise ValueError unless the last dimension of ``x`` is ``width``."""
    if x.shape[-1:] != (width,):
        name = type(layer).__name__
        raise ValueError(f"{name} takes {width} features in the last dimension, got {(*x.shape,)}")


class ColumnParallelLinear(nn.Module):
    """A linear layer cut along its output features: rank r has block r, of F/W features.

    ``linear``: the whole layer, the same on all ranks; it is neither changed nor kept, and nothing
    is communicated. ``weight`` (F/W, D) and ``bias`` (F/W) or None are this rank's rows:
    parameters of their own, contiguous, in the dtype of the whole, trainable if the whole one is,
    without a gradient. Raises ValueError if F does not divide by the number of ranks, or if this
    process is not in ``group``.
    """

    def __init__(
        self, linear: nn.Linear, group: Group = None, *, gather_output: bool = False
    ) -> None:
        super().__init__()
        self.group, self.gather_output = group, gather_output
        # --- exercise 2.15: start
        # Step 7: take this rank's rows of the weight, and with them its part of the bias
        block = block_of(linear.out_features, "output features", group)
        self.weight = shard(linear.weight, 0, block)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, block)
        # --- exercise 2.15: end

    def forward(self, x_ND: Tensor) -> Tensor:
        """(…, D), equal on all ranks, to this rank's (…, F/W); ``gather_output``: to all (…, F).

        Any number of leading dimensions. Output and gradients are those of the whole layer, or
        this rank's blocks of them. Forward sends nothing, with ``gather_output`` one all-gather;
        backward: one all-reduce of x's bytes, and nothing if x needs no gradient. ValueError,
        before anything is sent, if the last dimension is not D.
        """
        # --- exercise 2.15: start
        # Step 8: every rank uses all of x, so the gradient of x comes from all ranks
        # Step 9: gather the features only if asked for
        check_width(x_ND, self.weight.shape[1], self)
        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)
        return gather_from_ranks(y_Nf, -1, self.group) if self.gather_output else y_Nf
        # --- exercise 2.15: end


class RowParallelLinear(nn.Module):
    """A linear layer cut along its input features: rank r has block r, of D/W features.

    ``linear``: the whole layer, the same on all ranks; it is neither changed nor kept, and nothing
    is communicated. ``weight`` (F, D/W) are this rank's columns; ``bias`` (F) or None is
    replicated: parameters as in ``ColumnParallelLinear``. Raises ValueError if D does not divide
    by the number of ranks, or if this process is not in ``group``.
    """

    def __init__(
        self, linear: nn.Linear, group: Group = None, *, split_input: bool = False
    ) -> None:
        super().__init__()
        self.group, self.split_input = group, split_input
        # --- exercise 2.15: start
        # Step 10: take this rank's columns of the weight; keep the bias whole: it joins the sum
        block = block_of(linear.in_features, "input features", group)
        self.weight = shard(linear.weight, 1, block)
        whole = slice(0, linear.out_features)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, whole)
        # --- exercise 2.15: end

    def forward(self, x_Nd: Tensor) -> Tensor:
        """This rank's block (…, D/W) to (…, F), equal on all ranks.

        With ``split_input`` x is (…, D), equal on all ranks. Any number of leading dimensions.
        Output and gradients are those of the whole layer, or this rank's blocks of them. Forward:
        one all-reduce of the output's bytes; backward sends nothing (``split_input``: one
        all-gather of x). ValueError, before anything is sent, if the last dimension is of another
        size.
        """
        # --- exercise 2.15: start
        # Step 11: this rank's columns times its features are one term of the sum over ranks
        # Step 12: add the bias once, after the sum
        if self.split_input:
            x_Nd = split_to_ranks(x_Nd, -1, self.group)
        check_width(x_Nd, self.weight.shape[1], self)
        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)
        return y_NF if self.bias is None else y_NF + self.bias
        # --- exercise 2.15: end
