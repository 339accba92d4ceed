# for: 2.28
"""Written differently: one row per channel, torch's own variance, changed dictionaries."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def flat(x):
    return x.movedim(1, 0).flatten(1)


def unflat(rows, like):
    moved = like.movedim(1, 0)
    return rows.view(moved.shape).movedim(0, 1)


def group_moments(x, group=None):
    rows = flat(x.detach()).double()
    count = rows.shape[1]
    mean = var = rows.new_zeros(len(rows))
    if count:
        var, mean = torch.var_mean(rows, 1, correction=0)
    packed = torch.empty(2 * len(rows) + 1, dtype=torch.float64, device=x.device)
    packed[0] = count
    packed[1::2] = count * mean
    packed[2::2] = count * (var + mean**2)
    dist.all_reduce(packed, group=group)
    n = packed[:1].squeeze(0)
    mean, second = packed[1::2] / n.clamp(min=1), packed[2::2] / n.clamp(min=1)
    return mean, (second - mean**2).clamp(min=0), n


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, mean, invstd, n, group):
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, invstd, n)
        hat = Rows.hat(x, mean, invstd)
        if weight is not None:
            hat = torch.addcmul(bias.to(hat.dtype)[:, None], hat, weight.to(hat.dtype)[:, None])
        return torch.empty_like(x).copy_(unflat(hat, x))

    @staticmethod
    def hat(x, mean, invstd):
        rows = flat(x)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return (rows - mean.to(rows.dtype)[:, None]) * invstd.to(rows.dtype)[:, None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, mean, invstd, n = ctx.saved_tensors
        hat = Rows.hat(x, mean, invstd)
        rows = flat(grad).to(hat.dtype)
        own = torch.stack([rows.sum(1), torch.einsum("cm,cm->c", rows, hat)])
        of_x = None
        if ctx.needs_input_grad[0]:
            shared = own.clone()
            dist.all_reduce(shared, group=ctx.group)
            shared = (shared / n).to(hat.dtype)
            rows = torch.addcmul(rows - shared[0][:, None], hat, shared[1][:, None], value=-1)
            rows *= invstd.to(hat.dtype)[:, None]
            if weight is not None:
                rows *= weight.to(hat.dtype)[:, None]
            of_x = unflat(rows, x).to(x.dtype)
        none = [None] * 4
        return of_x, None if weight is None else own[1], None if weight is None else own[0], *none


class SyncBatchNorm(nn.BatchNorm1d):
    def __init__(self, *args, group=None, **kwargs):
        if dist.get_rank(group) < 0:
            raise ValueError("not in the group")
        super().__init__(*args, **kwargs)
        self.group = group

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError("no channels")
        if x.size(1) != self.num_features or not torch.is_floating_point(x):
            raise ValueError(f"{self.num_features} channels of floating-point numbers")

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        mean, var, n = group_moments(x, self.group)
        if self.track_running_stats:
            self.follow(mean, var, n)
        invstd = torch.rsqrt(var + self.eps)
        return Rows.apply(x, self.weight, self.bias, mean, invstd, n, self.group)

    def follow(self, mean, var, n):
        some = torch.gt(n, 1.5)
        self.num_batches_tracked.add_(some.long())
        factor = torch.full_like(n, self.momentum or 0.0)
        if self.momentum is None:
            factor = 1 / self.num_batches_tracked.clamp(min=1).double()
        factor = torch.where(some, factor, torch.zeros_like(factor))
        bessel = torch.where(some, n / (n - 1), torch.ones_like(n))
        for old, new in ((self.running_mean, mean), (self.running_var, var * bessel)):
            old.copy_(torch.where(some, torch.lerp(old.double(), new, factor), old.double()))


def convert_batch_norms(module, group=None):
    if dist.get_rank(group) < 0:
        raise ValueError("not in the group")
    new = {}
    for layer in module.modules():
        kind = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if kind and not isinstance(layer, SyncBatchNorm):
            new[layer] = SyncBatchNorm.__new__(SyncBatchNorm)
            new[layer].__dict__.update(layer.__dict__)
            new[layer].group = group
    for parent in module.modules():
        for name, layer in list(parent._modules.items()):
            if layer in new:
                parent._modules[name] = new[layer]
    return new.get(module, module)
