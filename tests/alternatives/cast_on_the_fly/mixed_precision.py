# for: 2.5
"""Written differently: the model is its own master, every forward casts anew inside autograd."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDE = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Softmax, nn.LogSoftmax)


def check_precision(model, dtype):
    if dtype not in {torch.bfloat16, torch.float16}:
        raise ValueError(f"{dtype} is not a 16-bit floating type: float16 or bfloat16")
    if hasattr(model, "wrapped_in") or isinstance(model, MixedPrecision):
        raise ValueError("this model is wrapped already")
    rounded = {n: p.dtype for n, p in model.named_parameters()}
    rounded = {n: d for n, d in rounded.items() if d.is_floating_point and d != torch.float32}
    if rounded:
        raise ValueError(f"these are not float32: {rounded}")
    device = next(model.parameters()).device
    try:
        torch.zeros(1, 1, device=device, dtype=dtype).mm(
            torch.zeros(1, 1, device=device, dtype=dtype)
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{dtype} on {device}: {error}") from None


class MixedPrecision(nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        check_precision(model, dtype)
        self.model, self.dtype = model, dtype
        model.wrapped_in = dtype
        wide = [m for m in model.modules() if isinstance(m, WIDE)]
        kept = {id(t) for m in wide for t in (*m.parameters(), *m.buffers())}
        self.low = [
            name
            for name, t in (*model.named_parameters(), *model.named_buffers())
            if id(t) not in kept and t.is_floating_point()
        ]
        for module in wide:
            module.forward = self._widened(module.forward)

    def _widened(self, forward):
        return lambda x: forward(x.to(torch.float32)).to(self.dtype)

    def forward(self, inputs):
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        cast = {name: tensors[name].to(self.dtype) for name in self.low}
        if inputs.dtype.is_floating_point:
            inputs = inputs.to(self.dtype)
        return torch.func.functional_call(self.model, cast, (inputs,)).to(torch.float32)

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)

    def write_back(self):
        """Nothing to do: the next forward casts the masters."""


def reduced(model, window, scale, group):
    """One vector of gradients and loss; (loss, targets, trainable parameters)."""
    model.zero_grad()
    trainable = [p for p in model.parameters() if p.requires_grad]
    device = trainable[0].device
    count = torch.zeros(1, dtype=torch.int64, device=device)
    for _, targets in window:
        count += (targets >= 0).sum()
    dist.all_reduce(count, group=group)
    total, losses = int(count), torch.zeros(1, device=device)
    for inputs, targets in window:
        loss = F.cross_entropy(model(inputs), targets, reduction="none", ignore_index=-100).sum()
        (loss * (scale / max(total, 1))).backward()
        losses += loss.detach()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    vector = torch.cat([losses, *(part.reshape(-1) for part in parts)])
    dist.all_reduce(vector, group=group)
    at = 1
    for p in trainable:
        p.grad = vector[at : at + p.numel()].view_as(p)
        at += p.numel()
    return float(vector[0]) / max(total, 1), total, trainable


def clip(trainable, limit):
    norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in trainable))
    if limit is not None and math.isfinite(norm) and norm > limit:
        for p in trainable:
            p.grad *= limit / norm
    return norm


def mixed_step(model, optimizer, window, *, max_norm=None, group=None):
    loss, total, trainable = reduced(model, window, 1.0, group)
    if not total:
        return 0.0, 0.0
    norm = clip(trainable, max_norm)
    optimizer.step()
    return loss, norm
