# for: 2.13
"""Written differently: layers' forward is replaced for the call, and the order comes from a greedy
scheduler."""

from __future__ import annotations

import torch

from .pipeline_parallel import Pipeline
from .pipeline_schedules import Step, needs


def zero_bubble(ranks, micro_batches):
    """In each unit of time a rank takes what can start, first of: F (if few are kept), B, W."""
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"{ranks} ranks and {micro_batches} micro-batches")
    done = set()
    counts = [dict.fromkeys("FBW", 0) for _ in range(ranks)]
    order = [[] for _ in range(ranks)]
    while any(count["W"] < micro_batches for count in counts):
        now = []
        for rank, count in enumerate(counts):
            few = count["F"] - count["B"] < ranks - rank and count["F"] - count["W"] < ranks
            for kind in "FBW":
                step = Step(kind, rank, count[kind])
                can = count[kind] < micro_batches and done.issuperset(needs(step, ranks - 1))
                if can and (kind != "F" or few):
                    count[kind] += 1
                    order[rank].append(step)
                    now.append(step)
                    break
        done.update(now)
    return order


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, record, *tensors):
        ctx.record, ctx.count = record, len(tensors)
        return record["output"].detach()

    @staticmethod
    def backward(ctx, gradient):
        record = ctx.record
        record["gradient"] = gradient
        record["later"].append(record)
        wanted = [x for x in record["data"] if x.requires_grad]
        found = iter(
            torch.autograd.grad(
                record["output"], wanted, gradient, retain_graph=True, allow_unused=True
            )
            if wanted
            else ()
        )
        back = [next(found) if x.requires_grad else None for x in record["data"]]
        return None, *back, *[None] * (ctx.count - len(back))


def split_forward(module, x):
    later, changed = [], []
    for layer in module.modules():
        weights = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if not weights or len(list(layer.modules())) > 1:
            continue

        def forward(*args, original=layer.forward, weights=weights, **kwargs):
            if kwargs or len(args) > 1 or not isinstance(args[0], torch.Tensor):
                return original(*args, **kwargs)
            (x,) = args
            inner = x.detach().requires_grad_(x.requires_grad)
            record = {"later": later, "data": [inner], "weights": weights}
            record["output"] = original(inner)
            return Halves.apply(record, x, *weights)

        layer.forward = forward
        changed.append(layer)
    try:
        return module(x), later
    finally:
        for layer in changed:
            del layer.forward


def weight_gradients(later):
    for record in later:
        if not record["output"].requires_grad:
            continue
        found = torch.autograd.grad(
            record["output"], record["weights"], record["gradient"], allow_unused=True
        )
        for weight, gradient in zip(record["weights"], found, strict=True):
            if gradient is None:
                continue
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    later.clear()


class ZeroBubblePipeline(Pipeline):
    kinds = "FBW"

    def step(self, inputs, targets):
        self.left = {}
        self.split = any(step.kind == "W" for step in self.steps)
        return super().step(inputs, targets)

    def call(self, stage, i, x):
        if not self.split:
            return self.chunks[stage](x)
        output, self.left[stage, i] = split_forward(self.chunks[stage], x)
        return output

    def take(self, step):
        if step.kind != "W":
            return super().take(step)
        return weight_gradients(self.left.pop((step.stage, step.micro_batch)))
