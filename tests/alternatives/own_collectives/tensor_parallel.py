# for: 2.14, 2.15
"""Written differently: the backwards send for themselves, and dimensions move to the front."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group
from solutions.phase2_advanced.tensor_parallel import block_of, place_in, shard


def _reduced(x: Tensor, group: Group) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result.copy_(x.detach())
    if result.dim() == 0:
        dist.all_reduce(result.view(1), op=dist.ReduceOp.SUM, group=group)
    else:
        dist.all_reduce(result, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
    return result


def _gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    first = x.detach().movedim(dim, 0).contiguous()
    shape = (first.shape[0] * dist.get_world_size(group), *first.shape[1:])
    whole = torch.empty(shape, dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, first, group=group)
    return whole.movedim(0, dim).contiguous()


class _CopyToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_reduced(grad, ctx.group), None)


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, None)


def copy_to_ranks(x: Tensor, group: Group = None) -> Tensor:
    if dist.get_rank(group) < 0:
        raise ValueError("copy_to_ranks: not a member of the group")
    return _CopyToRanks.apply(x, group)


def sum_over_ranks(x: Tensor, group: Group = None) -> Tensor:
    if dist.get_rank(group) < 0:
        raise ValueError("sum_over_ranks: not a member of the group")
    return _SumOverRanks.apply(x, group)


def cut(x: Tensor, dim: int, block: slice) -> Tensor:
    start, stop, _ = block.indices(x.shape[dim])
    return x.index_select(dim, torch.arange(start, stop, device=x.device)).contiguous()


class _SplitToRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, block: slice, group: Group) -> Tensor:
        ctx.place = (dim, group)
        return cut(x, dim, block)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group = ctx.place
        return (_gathered(grad, dim, group), None, None, None)


class _GatherFromRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        rank, length = (dist.get_rank(group), x.shape[dim])
        ctx.dim, ctx.block = (dim, slice(rank * length, (rank + 1) * length))
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (cut(grad, ctx.dim, ctx.block), None, None)


def split_to_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    rank, ranks = place_in(group)
    share, rest = divmod(x.shape[dim], ranks)
    if rest:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not divide by {ranks}")
    return _SplitToRanks.apply(x, dim, slice(rank * share, rank * share + share), group)


def gather_from_ranks(x: Tensor, dim: int, group: Group = None) -> Tensor:
    place_in(group)
    return _GatherFromRanks.apply(x, dim, group)


def check_width(x: Tensor, width: int, layer: nn.Module) -> None:
    if x.shape[-1] != width:
        name = type(layer).__name__
        raise ValueError(f"{name} takes {width} features in the last dimension, got {x.shape[-1]}")


class ColumnParallelLinear(nn.Module):
    def __init__(
        self, linear: nn.Linear, group: Group = None, *, gather_output: bool = False
    ) -> None:
        super().__init__()
        rows = block_of(linear.weight.shape[0], "rows of the weight", group)
        self.group = group
        self.gather_output = bool(gather_output)
        self.weight = shard(linear.weight, 0, rows)
        if linear.bias is None:
            self.bias = None
        else:
            self.bias = shard(linear.bias, 0, rows)

    def forward(self, x_ND: Tensor) -> Tensor:
        check_width(x_ND, self.weight.shape[1], self)
        y_Nf = copy_to_ranks(x_ND, self.group) @ self.weight.t()
        if self.bias is not None:
            y_Nf = y_Nf + self.bias
        if not self.gather_output:
            return y_Nf
        return gather_from_ranks(y_Nf, y_Nf.dim() - 1, self.group)


class RowParallelLinear(nn.Module):
    def __init__(
        self, linear: nn.Linear, group: Group = None, *, split_input: bool = False
    ) -> None:
        super().__init__()
        columns = block_of(linear.weight.shape[1], "columns of the weight", group)
        self.group = group
        self.inputs = linear.weight.shape[1]
        self.split_input = bool(split_input)
        self.weight = shard(linear.weight, 1, columns)
        if linear.bias is None:
            self.bias = None
        else:
            self.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)

    def forward(self, x_Nd: Tensor) -> Tensor:
        if self.split_input:
            check_width(x_Nd, self.inputs, self)
            x_Nd = split_to_ranks(x_Nd, x_Nd.dim() - 1, self.group)
        else:
            check_width(x_Nd, self.weight.shape[1], self)
        term_NF = torch.matmul(x_Nd, self.weight.transpose(0, 1))
        y_NF = sum_over_ranks(term_NF, self.group)
        if self.bias is not None:
            y_NF = torch.add(y_NF, self.bias)
        return y_NF
