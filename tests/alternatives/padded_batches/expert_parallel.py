# for: 2.25
"""Written differently: all local experts in one batched product, rows padded to the longest."""

from __future__ import annotations

from collections import namedtuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from .mixture_of_experts import Router  # noqa: F401 (the checks make routers of it)

Plan = namedtuple("Plan", "order_M gives gets")


def plan_dispatch(routing, group=None):
    ranks, count = dist.get_world_size(group), len(routing.load_E)
    key = torch.where(routing.kept_NK, routing.experts_NK, count).reshape(-1)
    by_expert, order = key.sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=key.device), right=True)
    mine = ends.diff(prepend=ends.new_zeros(1))
    both = torch.stack([mine, mine])
    dist.all_to_all_single(both[1], mine, group=group)
    both = both.tolist()
    each = count // ranks
    gives = [sum(both[0][r * each : (r + 1) * each]) for r in range(ranks)]
    gets = [both[1][r * each : (r + 1) * each] for r in range(ranks)]
    return Plan(order[: sum(gives)], gives, gets)


class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, gives, gets, group):
        ctx.back = gives, gets, group
        return Travel.send(rows, gives, gets, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gives, gets, group = ctx.back
        return Travel.send(grad, gets, gives, group), None, None, None

    @staticmethod
    def send(rows, gives, gets, group):
        out = torch.empty((sum(gets), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(
            out,
            rows.clone(memory_format=torch.contiguous_format),
            list(gets),
            list(gives),
            group=group,
        )
        return out


def move_rows(rows_MD, gives, gets, group=None):
    return Travel.apply(rows_MD, gives, gets, group)


def compute_experts(rows_RD, gets, up_eDF, down_eFD):
    count, fill = len(gets[0]), [0] * len(gets[0])
    places = []
    longest = max(map(sum, zip(*gets, strict=False)), default=0)
    for counts in gets:
        for e, n in enumerate(counts):
            places += range(e * longest + fill[e], e * longest + fill[e] + n)
            fill[e] += n
    index = torch.tensor(places, dtype=torch.long).to(rows_RD.device, non_blocking=True)
    padded = rows_RD.new_zeros(count * longest, rows_RD.shape[1]).index_copy(0, index, rows_RD)
    inner = torch.bmm(padded.view(count, longest, rows_RD.shape[1]), up_eDF)
    return torch.bmm(nn.functional.gelu(inner), down_eFD).flatten(0, 1)[index]


class ExpertParallel(nn.Module):
    def __init__(self, router, up_EDF, down_EFD):
        super().__init__()
        count, width = router.weight.shape
        ranks, rank = dist.get_world_size(router.group), dist.get_rank(router.group)
        fits = up_EDF.shape[:2] == (count, width) and down_EFD.shape == (
            count,
            up_EDF.shape[2],
            width,
        )
        if count % ranks or not fits:
            raise ValueError("experts that do not fit")
        each = count // ranks
        for name, whole in (("up", up_EDF), ("down", down_EFD)):
            own = whole.detach()[rank * each : (rank + 1) * each].clone()
            self.register_parameter(name, nn.Parameter(own, requires_grad=whole.requires_grad))
        self.router, self.rows = router, []

    def forward(self, x):
        group, width = self.router.group, x.shape[-1]
        routing = self.router(x)
        n, k = routing.weights_NK.shape
        order, gives, gets = plan_dispatch(routing, group)
        come = [sum(row) for row in gets]
        self.rows = [sum(column) for column in zip(*gets, strict=False)]
        rows = move_rows(
            x.reshape(n, width)[order.div(k, rounding_mode="floor")], gives, come, group
        )
        rows = move_rows(compute_experts(rows, gets, self.up, self.down), come, gives, group)
        weighed = rows * routing.weights_NK.reshape(n * k)[order][:, None]
        y = weighed.new_zeros(n, width).index_add(0, order // k, weighed)
        return y.to(x.dtype).reshape(x.shape), routing


def divide_expert_gradients(parameters, group=None):
    share = 1 / dist.get_world_size(group)
    for p in {id(p): p for p in parameters if p.requires_grad}.values():
        if p.grad is not None:
            p.grad.mul_(share)
