# for: 3.15
"""Written differently: gathering is an autograd function whose backward is the reduce-scatter.

No storage is resized and no hook is set: what autograd would save of a gathered vector it keeps as
a place in it (saved-tensor hooks), and the vector is gathered anew when the first of these places
is asked for. The chunks are dealt out with ``all_gather`` into a list.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import device_in
from solutions.phase3_multi_node.fsdp import FlatParameter as FlatParameter  # for later exercises


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, vector):
        ctx.vector = vector
        return vector.collect()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.vector.reduce(gradient), None


class Vector:
    """Parameters of one kind of a unit, of which this rank keeps a part."""

    def __init__(self, parameters, places, group):
        self.group, self.places = group, places
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.shapes = [p.shape for p in parameters]
        self.ends = list(accumulate(p.numel() for p in parameters))
        self.length = math.ceil(self.ends[-1] / self.size)
        low = self.rank * self.length
        flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        mine = flat[low : low + self.length].clone()
        self.shard = nn.Parameter(mine, requires_grad=parameters[0].requires_grad)
        self.again = None  # gathered for backward

    def collect(self):
        mine = self.shard.detach()
        if len(mine) < self.length:
            mine = torch.cat([mine, mine.new_zeros(self.length - len(mine))])
        full = mine.new_empty(self.length * self.size)
        dist.all_gather(list(full.split(self.length)), mine, group=self.group)
        return full

    def reduce(self, gradient):
        self.again = None
        mine = gradient.new_empty(self.length)
        pieces = list(gradient.contiguous().split(self.length))
        dist.reduce_scatter(mine, pieces, group=self.group)
        return mine[: len(self.shard)] / self.size

    def show(self, full):
        for end, shape, places in zip(self.ends, self.shapes, self.places, strict=True):
            value = None if full is None else full[end - shape.numel() : end].view(shape)
            for holder, name in places:
                setattr(holder, name, value)


class FSDP(nn.Module):
    def __init__(self, module, units=(), *, group=None):
        super().__init__()
        if dist.get_rank(group) < 0:
            raise ValueError("not in the group")
        owners = [*units, module]
        held = [set(unit.modules()) for unit in units]
        for k, parts in enumerate(held):
            if owners[k] is module or not parts <= set(module.modules()):
                raise ValueError(f"unit {k} is no proper part of the module")
            if any(parts & other for other in held[:k]):
                raise ValueError(f"unit {k} overlaps with another")
        held.append(set(module.modules()) - set().union(*held))
        homes = [{p for part in parts for p in part.parameters(recurse=False)} for parts in held]
        everything = list(module.parameters())
        if sum(map(len, homes)) != len(everything):
            raise ValueError("a parameter is tied across units")
        if len({p.device for p in everything}) != 1 or not any(p.requires_grad for p in everything):
            raise ValueError("one device and something to train are needed")
        self.module, self.group, self.vectors = module, group, []
        for owner, parts, home in zip(owners, held, homes, strict=True):
            places = {}
            for part in module.modules():
                for name, p in list(part._parameters.items()) if part in parts else ():
                    if p is not None:
                        places.setdefault(p, []).append((part, name))
                        del part._parameters[name]
            kinds = {}
            for p in places:
                kinds.setdefault((p.dtype, p.requires_grad), []).append(p)
            assert home == set(places)
            mine = [Vector(ps, [places[p] for p in ps], group) for ps in kinds.values()]
            self.vectors += mine
            owner.forward = self._around(owner.forward, mine)
        self.shards = nn.ParameterList(v.shard for v in self.vectors)

        self.kinds = [(p.dtype, p.requires_grad) for p in self.parameters()]

    def forward(self, *args, **kwargs):
        if self.kinds != [(p.dtype, p.requires_grad) for p in self.parameters()]:
            raise ValueError("the parameters are not what they were")
        self._forget()
        return self.module(*args, **kwargs)

    def _around(self, forward, mine):
        def call(*args, **kwargs):
            where = {}
            for vector in mine:
                full = _Gather.apply(vector.shard, vector)
                where[full.untyped_storage().data_ptr()] = vector
                vector.show(full)
                del full

            def pack(tensor):
                vector = where.get(tensor.untyped_storage().data_ptr())
                if vector is None:
                    return tensor
                return vector, tensor.shape, tensor.stride(), tensor.storage_offset()

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = forward(*args, **kwargs)
            for vector in mine:
                vector.show(None)
            where.clear()
            return out

        def unpack(saved):
            if isinstance(saved, torch.Tensor):
                return saved
            vector, *shape = saved
            if vector.again is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._forget)
                if len(mine) > 1 or vector.shard.requires_grad:
                    self._forget(mine)
                vector.again = vector.collect()
            return vector.again.as_strided(*shape)

        return call

    def _forget(self, but=()):
        for vector in self.vectors:
            if vector not in but:
                vector.again = None


def clip_by_global_norm(model, max_norm):
    if not max_norm > 0:
        raise ValueError(f"the limit must be positive, not {max_norm}")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.zeros(1, dtype=torch.float64, device=device_in(model.group))
    for g in grads:
        total += (g.double() ** 2).sum().to(total.device)
    dist.all_reduce(total, group=model.group)
    norm = math.sqrt(float(total))
    if math.isfinite(norm):
        for g in grads:
            g *= min(1.0, max_norm / max(norm, 1e-300))
    return norm
