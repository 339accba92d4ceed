# alternative for: 3.25
"""Written differently: one vector per dtype, reduce-scatter and all-gather, v scaled by η."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from given.agreement import expect_alike


def by_dtype(tensors):
    kinds = {}
    for t in tensors:
        kinds.setdefault(t.dtype, []).append(t)
    return list(kinds.values())


def mean_over_ranks(tensors, group=None):
    if dist.get_rank(group) == -1:
        raise ValueError("this rank is not in the group")
    if not all(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors):
        raise ValueError("integers have no mean")
    vectors = [torch.cat([t.detach().reshape(-1) for t in kind]) for kind in by_dtype(tensors)]
    for vector in vectors:
        average(vector, group)
    means = [torch.empty_like(t) for t in tensors]
    for kind, vector in zip(by_dtype(means), vectors, strict=True):
        vector_to_parameters(vector, kind)
    return means


def average(vector, group):
    """The two halves of an all-reduce, each as its own collective."""
    count = dist.get_world_size(group)
    padded = F.pad(vector, (0, -len(vector) % count)) / count
    chunk = padded.new_empty(len(padded) // count)
    dist.reduce_scatter_tensor(chunk, padded, group=group)
    dist.all_gather_into_tensor(padded, chunk, group=group)
    vector.copy_(padded[: len(vector)])


class LocalSGD:
    def __init__(self, model, *, every, group=None):
        if not every > 0:
            raise ValueError(f"H must be positive, not {every}")
        self.model, self.group, self.done, self.every = model, group, 0, every
        everything = [*model.parameters(), *model.buffers()]
        expect_alike(everything, group)
        for tensor in everything:
            self.from_first(tensor)
        self.kinds = by_dtype([p for p in model.parameters() if p.requires_grad])
        self.prepare()

    def prepare(self):
        pass

    def from_first(self, tensor):
        first = dist.get_global_rank(self.group, 0) if self.group else 0
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(copy, first, group=self.group)
        tensor.detach().copy_(copy)

    def step(self):
        self.done += 1
        return self.done % self.every == 0 and self.finish()

    def finish(self):
        if not self.done:
            return False
        self.done = 0
        for number, kind in enumerate(self.kinds):
            vector = parameters_to_vector(kind).detach()
            self.agree(number, vector)
            with torch.no_grad():
                for p, part in zip(kind, vector.split([p.numel() for p in kind]), strict=True):
                    p.copy_(part.view_as(p))
        buffers = list(self.model.buffers())
        for kind in by_dtype([b for b in buffers if b.is_floating_point()]):
            vector = torch.cat([b.reshape(-1) for b in kind])
            average(vector, self.group)
            for b, part in zip(kind, vector.split([b.numel() for b in kind]), strict=True):
                b.copy_(part.view(b.shape))
        for buffer in buffers:
            if not buffer.is_floating_point():
                self.from_first(buffer)
        return True

    def agree(self, number, vector):
        average(vector, self.group)


class DiLoCo(LocalSGD):
    """The velocity is kept times the learning rate, as Sutskever et al. write it."""

    def __init__(self, model, *, every, lr=0.7, momentum=0.9, group=None):
        if not (lr > 0 and math.isfinite(lr)) or not 0 <= momentum < 1:
            raise ValueError(f"outer lr {lr}, momentum {momentum}")
        self.lr, self.mu = lr, momentum
        super().__init__(model, every=every, group=group)

    def prepare(self):
        self.start = [parameters_to_vector(kind).detach().clone() for kind in self.kinds]
        self.scaled = [torch.zeros_like(start) for start in self.start]

    @property
    def common(self):
        return self.start

    @property
    def velocity(self):
        return [v / self.lr for v in self.scaled]

    def agree(self, number, vector):
        start, scaled = self.start[number], self.scaled[number]
        average(vector, self.group)
        gone = self.lr * (start - vector)
        scaled.mul_(self.mu).add_(gone)
        start.sub_(gone).sub_(scaled, alpha=self.mu)
        vector.copy_(start)


def train(model, optimizer, batches, rounds):
    losses, count = 0.0, 0
    for inputs, targets in batches:
        if targets.numel() > 0:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            (loss / len(targets)).backward()
            optimizer.step()
            losses, count = losses + loss.item(), count + len(targets)
        rounds.step()
    rounds.finish()
    device = next(model.parameters()).device
    both = torch.tensor([losses, count], dtype=torch.float64, device=device)
    dist.all_reduce(both, group=rounds.group)
    return float(both[0] / both[1].clamp(min=1)), int(both[1])
