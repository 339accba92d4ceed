# for: 2.8
"""Written differently: messages inside autograd functions, shapes inferred on the meta device."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class First(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.tokens, self.places = gpt.tokens, gpt.places

    def forward(self, tokens):
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]


class Last(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x):
        x = self.head(self.norm(x))
        return x.view(-1, x.shape[-1])


def layers_of(model):
    if hasattr(model, "blocks"):
        return [First(model), *model.blocks, Last(model)]
    return [model[number] for number in range(len(model))]


class ToNext(torch.autograd.Function):
    """Forward sends ``y``; backward receives its gradient."""

    @staticmethod
    def forward(ctx, y, stage):
        ctx.stage, ctx.like = stage, y
        dist.isend(y.contiguous(), group=stage.group, group_dst=stage.rank + 1).wait()
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        gradient = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.like.device)
        dist.irecv(gradient, group=ctx.stage.group, group_src=ctx.stage.rank + 1).wait()
        return gradient, None


class FromBefore(torch.autograd.Function):
    """Forward receives an activation; backward sends its gradient."""

    @staticmethod
    def forward(ctx, anchor, like, stage):
        ctx.stage = stage
        x = torch.empty(like.shape, dtype=like.dtype, device=anchor.device)
        dist.irecv(x, group=stage.group, group_src=stage.rank - 1).wait()
        return x

    @staticmethod
    def backward(ctx, gradient):
        stage = ctx.stage
        dist.isend(gradient.contiguous(), group=stage.group, group_dst=stage.rank - 1).wait()
        return None, None, None


def places(layers, bounds):
    """The stages of each parameter, in the order of the layers."""
    where = {}
    for number, layer in enumerate(layers):
        stage = sum(bound <= number for bound in bounds[1:-1])
        for p in layer.parameters():
            where.setdefault(p, set()).add(stage)
    return where


def tie_groups(layers, bounds, pipelines=None):
    made = {}
    for pipeline in pipelines or [[*range(dist.get_world_size())]]:
        members = sorted(pipeline)
        for p, stages in places(layers, bounds).items():
            ranks = tuple(members[s] for s in sorted(stages))
            if p.requires_grad and len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group([*ranks])
    return made


class Stage(nn.Module):
    def __init__(self, layers, bounds, group=None, groups=None):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        inner = sorted(set(bounds[1:-1]))
        inside = all(0 < bound < len(layers) for bound in inner)
        if not inside or [0, *inner, len(layers)] != list(bounds) or len(inner) != self.size - 1:
            raise ValueError(f"{bounds} is no cut of {len(layers)} layers into {self.size} stages")
        begin, end = bounds[self.rank], bounds[self.rank + 1]
        self.own = nn.ModuleList(layers[begin:end])
        self.before = [copy.deepcopy(layer).to("meta") for layer in layers[:begin]]
        self.likes = {}
        if groups is None and len(bounds) > dist.get_world_size():
            groups = tie_groups(layers, bounds)
        self.shared = []
        for p, stages in places(layers, bounds).items():
            if len(stages) > 1 and p.requires_grad:
                ranks = tuple(dist.get_process_group_ranks(group)[s] for s in sorted(stages))
                if ranks not in (groups or {}):
                    raise ValueError(f"there is no group of ranks {ranks}")
                if self.rank in stages:
                    self.shared.append((p, groups[ranks]))
        for p, own_group in self.shared:
            dist.broadcast(p.data, group_src=0, group=own_group)

    def forward(self, inputs):
        x = inputs
        if self.rank:
            like = self.likes.get(inputs.shape)
            if like is None:
                like = inputs.to("meta")
                for layer in self.before:
                    like = layer(like)
                self.likes[inputs.shape] = like = like.detach()
            anchor = torch.zeros(1, device=inputs.device, requires_grad=True)
            x = FromBefore.apply(anchor, like, self)
        for layer in self.own:
            x = layer(x)
        if self.rank == self.size - 1:
            return x
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        return ToNext.apply(x, self)


def forward_backward(stage, inputs, targets, loss_fn=F.cross_entropy):
    end = stage(inputs)
    loss = torch.zeros(1, dtype=torch.float64, device=inputs.device)
    if stage.rank == stage.size - 1:
        end = loss_fn(end, targets)
        loss[0] = end.detach()
    end.backward()
    dist.all_reduce(loss, group=stage.group)
    return float(loss)


def reduce_ties(stage):
    for p, group in stage.shared:
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient, group=group, async_op=True).wait()
        p.grad = gradient


def train_step(stage, optimizer, inputs, targets, loss_fn=F.cross_entropy):
    for p in stage.parameters():
        p.grad = None
    loss = forward_backward(stage, inputs, targets, loss_fn)
    reduce_ties(stage)
    optimizer.step()
    return loss
