# for: 2.25
"""Written differently: places by counting instead of sorting, one index per expert."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .mixture_of_experts import Router  # noqa: F401 (the checks make routers of it)


class Plan(NamedTuple):
    order_M: Any
    gives: Any
    gets: Any


def plan_dispatch(routing, group=None):
    ranks, count = dist.get_world_size(group), routing.load_E.shape[0]
    flat = routing.experts_NK.flatten()
    hot = (flat[:, None] == torch.arange(count, device=flat.device)) & routing.kept_NK.reshape(
        -1, 1
    )
    mine = hot.sum(0)
    theirs = mine.clone()
    dist.all_to_all_single(theirs, mine, group=group)
    sizes = torch.cat([mine, theirs]).tolist()
    each, total = count // ranks, sum(sizes[:count])
    begin = mine.cumsum(0) - mine
    place = ((begin + hot.cumsum(0) - 1) * hot).sum(1)
    place = torch.where(hot.any(1), place, total)  # dropped choices go to a place behind all
    order = flat.new_zeros(total + 1)
    order[place] = torch.arange(len(flat), device=flat.device)
    table = [sizes[i : i + each] for i in range(0, len(sizes), each)]
    return Plan(order[:total], [sum(row) for row in table[:ranks]], table[ranks:])


class There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, gives, gets, group):
        ctx.ways = gives, gets, group
        out = rows.new_empty((sum(gets), rows.shape[1]))
        work = dist.all_to_all_single(
            out, rows.contiguous(), gets, gives, group=group, async_op=True
        )
        work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        gives, gets, group = ctx.ways
        return There.apply(grad, gets, gives, group), None, None, None


def move_rows(rows_MD, gives, gets, group=None):
    return There.apply(rows_MD, gives, gets, group)


def compute_experts(rows_RD, gets, up_eDF, down_eFD):
    begins = [0, *accumulate(n for counts in gets for n in counts)]
    e_count, found = len(gets[0]), rows_RD.new_zeros(rows_RD.shape[0], down_eFD.shape[-1])
    for e, (up, down) in enumerate(zip(up_eDF.unbind(0), down_eFD.unbind(0), strict=False)):
        own = [
            range(begins[r * e_count + e], begins[r * e_count + e + 1]) for r in range(len(gets))
        ]
        index = torch.tensor([i for part in own for i in part], dtype=torch.long)
        index = index.to(rows_RD.device, non_blocking=True)
        y = torch.mm(nn.functional.gelu(torch.mm(rows_RD.index_select(0, index), up)), down)
        found = found.index_add(0, index, y)
    return found


class ExpertParallel(nn.Module):
    def __init__(self, router, up_EDF, down_EFD):
        super().__init__()
        self.router, self.rows, self.group = router, [], router.group
        e, d = router.weight.shape
        f = up_EDF.size(2)
        if [*up_EDF.shape, *down_EFD.shape] != [e, d, f, e, f, d]:
            raise ValueError("the weights do not fit each other or the router")
        ranks = dist.get_world_size(self.group)
        if e % ranks:
            raise ValueError(f"{e} experts for {ranks} ranks")
        mine = dist.get_rank(self.group)
        up, down = (w.detach().chunk(ranks)[mine].clone() for w in (up_EDF, down_EFD))
        self.up = nn.Parameter(up, requires_grad=up_EDF.requires_grad)
        self.down = nn.Parameter(down, requires_grad=down_EFD.requires_grad)

    def forward(self, x):
        routing = self.router(x)
        flat, k = x.reshape(-1, x.shape[-1]), routing.kept_NK.shape[-1]
        plan = plan_dispatch(routing, self.group)
        arrive = [sum(row) for row in plan.gets]
        self.rows = [sum(row[e] for row in plan.gets) for e in range(len(self.up))]
        many = flat.repeat_interleave(k, 0)
        rows = move_rows(many.index_select(0, plan.order_M), plan.gives, arrive, self.group)
        rows = compute_experts(rows, plan.gets, self.up, self.down)
        rows = move_rows(rows, arrive, plan.gives, self.group)
        back = torch.zeros_like(many).index_add(0, plan.order_M, rows)
        wide = routing.weights_NK.dtype
        y = torch.bmm(routing.weights_NK[:, None], back.view(len(flat), k, flat.shape[1]).to(wide))
        return y[:, 0].to(x.dtype).view_as(x), routing


def divide_expert_gradients(parameters, group=None):
    done = set()
    for p in parameters:
        if p.requires_grad and p.grad is not None and p not in done:
            p.grad.div_(dist.get_world_size(group))
            done.add(p)
