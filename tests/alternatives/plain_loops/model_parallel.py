# for: 2.8
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

Loss = Callable[[Tensor, Tensor], Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_DIMS = 8


class Embed(nn.Module):
    def __init__(self, tokens: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = (tokens, places)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.tokens(tokens_BT) + self.places(places_T)


class Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.head = (norm, head)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD)).flatten(0, 1)


def layers_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.Sequential):
        return list(model)
    return [Embed(model.tokens, model.places), *model.blocks, Head(model.norm, model.head)]


def tied_stages(layers, bounds) -> dict[nn.Parameter, list[int]]:
    holders: dict[nn.Parameter, list[int]] = {}
    for s, (first, end) in enumerate(pairwise(bounds)):
        distinct = dict.fromkeys(p for layer in layers[first:end] for p in layer.parameters())
        for p in distinct:
            if p.requires_grad:
                holders.setdefault(p, []).append(s)
    return {p: stages for p, stages in holders.items() if len(stages) > 1}


def tie_groups(layers, bounds, pipelines=None):
    made = {}
    for stages in tied_stages(layers, bounds).values():
        for pipeline in pipelines or [range(dist.get_world_size())]:
            members = sorted(pipeline)
            made.setdefault(tuple(members[s] for s in stages), None)
    for ranks in made:
        made[ranks] = dist.new_group(ranks, backend=dist.get_backend())
    return made


class Stage(nn.Module):
    def __init__(self, layers, bounds, group: Group = None, groups=None) -> None:
        super().__init__()
        self.group, self.rank, self.count = (
            group,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        self.ties: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.shapes: dict[torch.Size, tuple[torch.dtype, Sequence[int]]] = {}
        bounds = list(bounds)
        rising = all((first < end for first, end in pairwise(bounds)))
        if not bounds or bounds[0] != 0 or bounds[-1] != len(layers) or (not rising):
            raise ValueError(f"the bounds {bounds} don't divide {len(layers)} layers")
        if len(bounds) != self.count + 1:
            raise ValueError(
                f"the bounds {bounds} make {len(bounds) - 1} stages for {self.count} ranks"
            )
        self.layers = nn.Sequential(*layers[bounds[self.rank] : bounds[self.rank + 1]])
        whole = dist.group.WORLD if group is None else group
        if groups is None and self.count == dist.get_world_size():
            groups = tie_groups(layers, bounds)
        mine = []
        for p, stages in tied_stages(layers, bounds).items():
            ranks = tuple(dist.get_global_rank(whole, s) for s in stages)
            if ranks not in (groups or {}):
                raise ValueError(f"no group of the ranks {ranks} was passed in")
            if self.rank in stages:
                mine.append((p, groups[ranks], ranks[0]))
        for p, tied, first in mine:
            self.ties.append((p, tied))
            value = p.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(value, src=first, group=tied)
            with torch.no_grad():
                p.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def send_activation(stage: Stage, y: Tensor, announce: bool) -> None:
    y = y.detach().contiguous()
    if announce:
        if y.dtype not in DTYPES or y.dim() > MOST_DIMS:
            raise ValueError(f"an activation of {y.dtype} with {y.dim()} dimensions can't be sent")
        facts = [DTYPES.index(y.dtype), y.dim(), *y.shape]
        facts += [0] * (2 + MOST_DIMS - len(facts))
        header = torch.tensor(facts, dtype=torch.int64, device=y.device)
        dist.send(header, group=stage.group, group_dst=stage.rank + 1)
    dist.send(y, group=stage.group, group_dst=stage.rank + 1)


def receive_activation(stage: Stage, inputs: Tensor) -> Tensor:
    known = stage.shapes.get(inputs.shape)
    if stage.rank == 0:
        stage.shapes[inputs.shape] = (inputs.dtype, tuple(inputs.shape))
        return inputs
    if known is None:
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=inputs.device)
        dist.recv(header, group=stage.group, group_src=stage.rank - 1)
        kind, dims, *sizes = header.tolist()
        known = (DTYPES[kind], tuple(sizes[:dims]))
        stage.shapes[inputs.shape] = known
    dtype, shape = known
    x = torch.empty(shape, dtype=dtype, device=inputs.device)
    dist.recv(x, group=stage.group, group_src=stage.rank - 1)
    return x.requires_grad_()


def forward_backward(
    stage: Stage, inputs: Tensor, targets: Tensor, loss_fn: Loss = F.cross_entropy
) -> float:
    first, last = (stage.rank == 0, stage.rank == stage.count - 1)
    announce = inputs.shape not in stage.shapes
    x = receive_activation(stage, inputs)
    y = stage(x if first else x.clone())
    if last:
        loss = loss_fn(y, targets)
        value = loss.detach().to(torch.float64).reshape(1)
        if loss.requires_grad:
            loss.backward()
    else:
        send_activation(stage, y, announce)
        gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        dist.recv(gradient, group=stage.group, group_src=stage.rank + 1)
        value = torch.empty(1, dtype=torch.float64, device=inputs.device)
        if y.requires_grad:
            y.backward(gradient)
    if not first:
        back = torch.zeros_like(x) if x.grad is None else x.grad
        dist.send(back.detach().contiguous(), group=stage.group, group_dst=stage.rank - 1)
    dist.broadcast(value, group=stage.group, group_src=stage.count - 1)
    return float(value)


def reduce_ties(stage: Stage) -> None:
    for p, group in stage.ties:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        total = p.grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        p.grad.copy_(total)


def train_step(
    stage: Stage,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: Loss = F.cross_entropy,
) -> float:
    optimizer.zero_grad()
    stage.zero_grad()
    loss = forward_backward(stage, inputs, targets, loss_fn)
    reduce_ties(stage)
    optimizer.step()
    return loss
