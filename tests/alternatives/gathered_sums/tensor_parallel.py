# for: 2.14, 2.15
"""Written differently: hooks instead of functions, reduce-scatter plus all-gather, full indices."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def place_in(group=None):
    if dist.get_rank(group) == -1:
        raise ValueError("not a member of the group")
    return dist.get_rank(group), dist.get_world_size(group)


def block_of(size, what, group):
    rank, world_size = place_in(group)
    if size % world_size != 0:
        raise ValueError(f"{world_size} ranks can't have equal parts of {size} {what}")
    return slice(size // world_size * rank, size // world_size * (rank + 1))


def check_width(x, width, layer):
    if x.shape[-1] != width:
        raise ValueError(f"{layer} wants {width} features, not {x.shape[-1]}")


def reduced(x, group):
    """Reduce-scatter and all-gather of the padded, flattened tensor."""
    world_size = dist.get_world_size(group)
    flat = x.detach().reshape(-1)
    share = -(-flat.numel() // world_size)
    if flat.numel() % world_size:
        total = flat.clone()
        dist.all_reduce(total, group=group)
        return total.view(x.shape)
    mine = flat.new_empty(share)
    dist.reduce_scatter_tensor(mine, flat.contiguous(), group=group)
    total = flat.new_empty(share * world_size)
    dist.all_gather_into_tensor(total, mine, group=group)
    return total.view(x.shape)


def joined(x, dim, group):
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim)


def copy_to_ranks(x, group=None):
    """The identity with a hook on its gradient."""
    place_in(group)
    if not x.requires_grad:
        return x
    y = x * 1
    y.register_hook(lambda grad: reduced(grad, group))
    return y


def sum_over_ranks(x, group=None):
    """x plus a constant: the other ranks' terms."""
    place_in(group)
    total = reduced(x, group)
    return (x + (total - x).detach()).contiguous() if x.requires_grad else total


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.place = dim, group
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        dim, group = ctx.place
        rank, world_size = place_in(group)
        return grad.tensor_split(world_size, dim)[rank].clone(), None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.place = dim, group
        rank, world_size = place_in(group)
        index = torch.arange(x.shape[dim], device=x.device).view(world_size, -1)[rank]
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx, grad):
        return joined(grad, *ctx.place), None, None


def split_to_ranks(x, dim, group=None):
    block_of(x.shape[dim], "elements", group)
    return _Part.apply(x, dim, group)


def gather_from_ranks(x, dim, group=None):
    return _Joined.apply(x, dim, group)


def shard(full, dim, block):
    index = torch.arange(block.start, block.stop, device=full.device)
    return nn.Parameter(full.data.index_select(dim, index), requires_grad=full.requires_grad)


class ColumnParallelLinear(nn.Module):
    """As a product with the transposed block."""

    def __init__(self, linear, group=None, *, gather_output=False):
        super().__init__()
        block = block_of(len(linear.weight), "rows", group)
        self.group, self.gather_output = group, gather_output
        self.weight = shard(linear.weight, 0, block)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = shard(linear.bias, 0, block)

    def forward(self, x):
        check_width(x, self.weight.shape[-1], "columns")
        y = copy_to_ranks(x, self.group) @ self.weight.t()
        if self.bias is not None:
            y = y + self.bias
        return gather_from_ranks(y, y.ndim - 1, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """The first rank's term carries the bias, whose gradient all ranks need."""

    def __init__(self, linear, group=None, *, split_input=False):
        super().__init__()
        self.group, self.split_input = group, split_input
        block = block_of(linear.weight.shape[1], "columns", group)
        self.weight = shard(linear.weight, 1, block)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = shard(linear.bias, 0, slice(0, len(linear.bias)))

    def forward(self, x):
        if self.split_input:
            x = split_to_ranks(x, x.ndim - 1, self.group)
        check_width(x, self.weight.shape[-1], "rows")
        y = sum_over_ranks(x @ self.weight.t(), self.group)
        return y if self.bias is None else torch.add(y, self.bias)
