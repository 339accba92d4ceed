# for: 2.18
"""Written differently: positions first, lists of blocks, nothing sent that nobody wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group

from .parallel_transformer import ParallelBlock
from .tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_width,
    place_in,
)

TIME = 1


def start_gather(x_BtD: Tensor, group: Group) -> Callable[[], Tensor]:
    ranks = dist.get_world_size(group)
    own = x_BtD.movedim(TIME, 0).contiguous()
    parts = [torch.empty_like(own) for _ in range(ranks)]
    work = dist.all_gather(parts, own, group=group, async_op=True)

    def finish(kept: Tensor = own) -> Tensor:
        work.wait()
        return torch.cat(parts, 0).movedim(0, TIME).contiguous()

    return finish


def start_scatter(x_BTD: Tensor, group: Group) -> Callable[[], Tensor]:
    ranks = dist.get_world_size(group)
    by_time = torch.empty(
        (x_BTD.shape[TIME], x_BTD.shape[0], *x_BTD.shape[2:]),
        dtype=x_BTD.dtype,
        device=x_BTD.device,
    )
    by_time.copy_(x_BTD.detach().movedim(TIME, 0))
    own = by_time.new_empty(by_time.shape[0] // ranks, *by_time.shape[1:])
    work = dist.reduce_scatter_tensor(own, by_time, group=group, async_op=True)

    def finish(kept: Tensor = by_time) -> Tensor:
        work.wait()
        return own.movedim(0, TIME).contiguous()

    return finish


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: Group) -> Tensor:
        ctx.of = group
        finish = start_gather(x_BtD, group)
        return finish()

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        finish = start_scatter(grad_BTD, ctx.of)
        return (finish(), None)


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: Group) -> Tensor:
        ctx.of = group
        finish = start_scatter(x_BTD, group)
        return finish()

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor | None, ...]:
        finish = start_gather(grad_BtD, ctx.of)
        return (finish(), None)


def gather_sequence(x_BtD: Tensor, group: Group = None) -> Tensor:
    if dist.get_rank(group) < 0:
        raise ValueError("gather_sequence: this process is no member of the group")
    return _GatherSequence.apply(x_BtD, group)


def scatter_sequence(x_BTD: Tensor, group: Group = None) -> Tensor:
    _, ranks = place_in(group)
    if x_BTD.shape[TIME] % ranks:
        raise ValueError(f"T = {x_BTD.shape[TIME]} does not divide by {ranks}")
    return _ScatterSequence.apply(x_BTD, group)


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, weight_fD: Tensor, bias_f: Tensor, regather: bool, group: Group
    ) -> Tensor:
        whole = start_gather(x_BtD, group)()
        y = whole @ weight_fD.t()
        if bias_f is not None:
            y += bias_f
        ctx.regather, ctx.of = (regather, group)
        if regather:
            ctx.save_for_backward(x_BtD, weight_fD)
        else:
            ctx.save_for_backward(whole, weight_fD)
        return y

    @staticmethod
    def backward(ctx: Any, grad_BTf: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_fD = ctx.saved_tensors
        need_x, need_weight, need_bias, _, _ = ctx.needs_input_grad
        whole = start_gather(kept, ctx.of) if ctx.regather else lambda: kept
        scattering = start_scatter(torch.matmul(grad_BTf, weight_fD), ctx.of) if need_x else None
        bias = grad_BTf.sum(dim=(0, 1)) if need_bias else None
        x_BTD, weight = (whole(), None)
        if need_weight:
            rows = grad_BTf.reshape(-1, grad_BTf.shape[-1])
            weight = torch.mm(rows.t(), x_BTD.reshape(-1, x_BTD.shape[-1]))
        return (scattering() if scattering else None, weight, bias, None, None)


class SequenceColumnLinear(ColumnParallelLinear):
    regather = False

    def forward(self, x_BtD: Tensor) -> Tensor:
        features = self.weight.shape[1]
        check_width(x_BtD, features, self)
        arguments = (x_BtD, self.weight, self.bias, bool(self.regather), self.group)
        return _GatherLinear.apply(*arguments)


class SequenceRowLinear(RowParallelLinear):
    def forward(self, x_BTd: Tensor) -> Tensor:
        features = self.weight.shape[1]
        check_width(x_BTd, features, self)
        _, ranks = place_in(self.group)
        if x_BTd.shape[TIME] % ranks:
            raise ValueError(f"T = {x_BTd.shape[TIME]} does not divide by {ranks}")
        mine = scatter_sequence(x_BTd @ self.weight.t(), self.group)
        if self.bias is not None:
            mine = mine + self.bias
        return mine


class SequenceParallelBlock(ParallelBlock):
    column, row = (SequenceColumnLinear, SequenceRowLinear)

    def __init__(self, block: Any, group: Group = None, *, regather: bool = False) -> None:
        super().__init__(block, group)
        for layer in (self.qkv, self.up):
            layer.regather = bool(regather)

    def replicated(self) -> Iterator[nn.Parameter]:
        found: dict[int, nn.Parameter] = {}
        for module in (self.norm_attention, self.norm_mlp):
            found.update((id(p), p) for p in module.parameters())
        found.update(
            (id(row.bias), row.bias) for row in (self.out, self.down) if row.bias is not None
        )
        return iter(found.values())


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    seen: set[int] = set()
    trained = []
    for parameter in parameters:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            trained.append(parameter)
    for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
        some = [parameter for parameter in trained if parameter.dtype == dtype]
        message = torch.zeros(sum(p.numel() for p in some), dtype=dtype, device=some[0].device)
        offset = 0
        for parameter in some:
            if parameter.grad is not None:
                message[offset : offset + parameter.numel()].view(parameter.shape).copy_(
                    parameter.grad
                )
            offset += parameter.numel()
        dist.all_reduce(message, group=group)
        offset = 0
        with torch.no_grad():
            for parameter in some:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                share = message[offset : offset + parameter.numel()]
                parameter.grad.copy_(share.view(parameter.shape))
                offset += parameter.numel()
