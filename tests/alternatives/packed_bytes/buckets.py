# for: 3.9
"""Written differently: kinds one after the other, strides by as_strided, state as plain bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def partition(tensors, limit, first_limit):
    if min(limit, first_limit) <= 0:
        raise ValueError(f"{min(limit, first_limit)} bytes are no size for a bucket")
    done = []
    for kind in {(t.dtype, t.device): None for t in tensors}:
        current, left = [], first_limit
        for place, t in enumerate(tensors):
            if (t.dtype, t.device) != kind:
                continue
            nbytes = t.numel() * t.element_size()
            if current and nbytes > left:
                done.append(current)
                current, left = [], limit
            current.append(place)
            left -= nbytes
        done.append(current)
    done.sort(key=max)
    return done


class Bucket:
    def __init__(self, index, parameters):
        self.index, self.parameters = index, list(parameters)
        total = sum(p.numel() for p in self.parameters)
        like = self.parameters[0].detach()
        self.buffer = torch.full((total,), 0, dtype=like.dtype, device=like.device)
        self.views, offset = [], 0
        for p in self.parameters:
            strides, step = [0] * p.dim(), 1
            for d in sorted(range(p.dim()), key=lambda d: (p.stride(d), -d)):
                strides[d], step = step, step * p.shape[d]
            self.views.append(self.buffer.as_strided(p.shape, strides, offset))
            offset += p.numel()

    def take(self, place, share=1.0):
        p, view = self.parameters[place], self.views[place]
        old, p.grad = p.grad, None
        if old is None:
            view.fill_(0)
        else:
            if old.is_sparse:
                raise ValueError("gradients must be dense, this one is sparse")
            if old.data_ptr() != view.data_ptr():
                view[...] = old if share == 1 else old * share
            elif share != 1:
                view *= share
        p.grad = view


def laid_out_like(p, flat):
    raise AssertionError("not used here")


def make_buckets(parameters, limit, first_limit):
    buckets = []
    for places in partition(parameters, limit, first_limit):
        buckets.append(Bucket(len(buckets), [parameters[i] for i in places]))
        for k, p in enumerate(buckets[-1].parameters):
            if p.grad is not None:
                buckets[-1].take(k)
    return buckets


def refuse_strangers(group):
    if dist.get_rank(group) == -1:
        raise ValueError("this rank is not in the group")


def order_of_first_rank(arrived, device, group=None):
    refuse_strangers(group)
    order = torch.zeros(len(arrived), dtype=torch.int32, device=device)
    if dist.get_rank(group) == 0:
        order += torch.tensor(arrived, dtype=torch.int32, device=device)
    first = dist.get_process_group_ranks(group)[0]
    dist.broadcast(order, first, group=group)
    return [int(i) for i in order]


def broadcast_tensors(tensors, limit, group=None):
    refuse_strangers(group)
    partition([], limit, limit)
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in tensors]
    message, size = [], 0
    for k, part in enumerate(raw):
        if message and size + len(part) > limit:
            _send(tensors, raw, message, group)
            message, size = [], 0
        message.append(k)
        size += len(part)
    if message:
        _send(tensors, raw, message, group)


@torch.no_grad()
def _send(tensors, raw, message, group):
    flat = torch.cat([raw[k] for k in message])
    dist.broadcast(flat, dist.get_process_group_ranks(group)[0], group=group)
    offset = 0
    for k in message:
        part = flat[offset : offset + len(raw[k])].clone()  # aligned for its dtype
        tensors[k].copy_(part.view(tensors[k].dtype).view(tensors[k].shape))
        offset += len(raw[k])
