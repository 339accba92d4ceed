# for: 2.18
"""Written differently: lists of blocks, every rank sums for itself, packed activations."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from .parallel_transformer import ParallelBlock
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    block_of,
    check_width,
    place_in,
)


def all_positions(part, group):
    blocks = [torch.empty_like(part.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(blocks, part.detach().contiguous(), group=group)
    return torch.cat(blocks, 1)


def my_positions(x, group):
    """Every rank is sent its positions of every term, and adds them up."""
    world_size = dist.get_world_size(group)
    terms = torch.stack(x.detach().chunk(world_size, 1))
    received = torch.empty_like(terms)
    dist.all_to_all_single(received, terms, group=group)
    return received.sum(0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return all_positions(part, group)

    @staticmethod
    def backward(ctx, grad):
        return my_positions(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return my_positions(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_positions(grad, ctx.group), None


def start_gather(part, group):
    part, count = part.contiguous(), dist.get_world_size(group)
    blocks = [torch.empty_like(part) for _ in range(count)]
    work = dist.all_gather(blocks, part, group=group, async_op=True)
    return lambda: work.wait() and torch.cat(blocks, 1)


def start_scatter(x, group):
    terms = torch.stack(x.chunk(dist.get_world_size(group), 1))
    received = torch.empty_like(terms)
    work = dist.all_to_all_single(received, terms, group=group, async_op=True)
    return lambda: work.wait() and received.sum(0)


def gather_sequence(x, group=None):
    place_in(group)
    return _Gather.apply(x, group)


def scatter_sequence(x, group=None):
    block_of(x.shape[1], "positions", group)
    return _Scatter.apply(x, group)


class _Column(ColumnParallelLinear):
    """regather: what autograd would keep of the gathered input is this rank's part, packed."""

    regather = False

    def forward(self, part):
        check_width(part, self.weight.shape[1], self)
        whole = gather_sequence(part, self.group)
        kept = whole.untyped_storage().data_ptr()

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() == kept:
                return part.detach(), tensor.shape, tensor.dtype
            return tensor

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            small, shape, dtype = packed
            return all_positions(small, self.group).view(shape).to(dtype)

        if not self.regather:
            return F.linear(whole, self.weight, self.bias)
        with saved_tensors_hooks(pack, unpack):
            return F.linear(whole, self.weight, self.bias)


class _Row(RowParallelLinear):
    def forward(self, x):
        check_width(x, self.weight.shape[1], self)
        y = scatter_sequence(x @ self.weight.t(), self.group)
        return y if self.bias is None else y + self.bias


class SequenceParallelBlock(ParallelBlock):
    column, row = _Column, _Row

    def __init__(self, block, group=None, *, regather=False):
        super().__init__(block, group)
        for layer in (self.qkv, self.up):
            layer.regather = regather

    def replicated(self):
        for name, p in self.named_parameters():
            if name.startswith("norm") or name in ("out.bias", "down.bias"):
                yield p


def sum_replicated_gradients(parameters, group=None):
    """Sorted by the name of the dtype."""
    unique = {id(p): p for p in parameters if p.requires_grad}.values()
    for p in unique:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for dtype in sorted({p.dtype for p in unique}, key=str):
        grads = [p.grad for p in unique if p.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        for g in grads:
            g.copy_(flat[: g.numel()].view_as(g))
            flat = flat[g.numel() :]
