# for: 2.28
"""Written differently: one pass over the values in float64, and layers made by their arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import rank_in


def shaped(values, x):
    return values.reshape((1, -1) + (1,) * (x.dim() - 2))


def over_channels(x):
    return x.transpose(0, 1).reshape(x.shape[1], x[:, 0].numel())


def group_moments(x, group=None):
    wide = over_channels(x.detach()).double()
    count = wide.new_tensor([wide.shape[1]])
    packed = torch.cat([count, wide.sum(1), (wide * wide).sum(1)])
    dist.all_reduce(packed, dist.ReduceOp.SUM, group)
    n, (total, squares) = packed[0], packed[1:].view(2, -1)
    safe = torch.where(n > 0, n, torch.ones_like(n))
    mean = total / safe
    return mean, torch.relu(squares / safe - mean * mean), n


class Whiten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, n, eps, group):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale = 1 / torch.sqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, scale, n)
        ctx.more = wide, group
        factor = scale if weight is None else scale * weight.double()
        y = torch.empty_like(x)
        out = (x.to(wide) - shaped(mean, x).to(wide)) * shaped(factor, x).to(wide)
        return y.copy_(out if bias is None else out + shaped(bias, x).to(wide))

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("a batch norm over ranks has no second derivative")
        x, weight, mean, scale, n = ctx.saved_tensors
        wide, group = ctx.more
        hat = ((x.to(wide) - shaped(mean, x).to(wide)) * shaped(scale, x)).to(wide)
        grad = grad.to(wide)
        of_bias, of_weight = over_channels(grad).sum(1), over_channels(grad * hat).sum(1)
        of_x = None
        if ctx.needs_input_grad[0]:
            shared = torch.cat([of_bias, of_weight])
            dist.all_reduce(shared, group=group)
            of_bias_all, of_weight_all = shared.to(wide).chunk(2)
            inner = grad * n - shaped(of_bias_all, x) - hat * shaped(of_weight_all, x)
            factor = scale if weight is None else scale * weight.double()
            of_x = (inner * shaped(factor / n, x)).to(x.dtype)
        if weight is None:
            of_weight = of_bias = None
        return of_x, of_weight, of_bias, None, None, None, None, None


class SyncBatchNorm(nn.Module):
    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        *,
        group=None,
    ):
        rank_in(group)
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats, self.group = affine, track_running_stats, group
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        start = (torch.zeros(num_features), torch.ones(num_features), torch.tensor(0))
        kept = start if track_running_stats else (None, None, None)
        names = "running_mean", "running_var", "num_batches_tracked"
        for name, value in zip(names, kept, strict=True):
            self.register_buffer(name, value)

    def forward(self, x):
        if x.dim() == 1 or x.shape[1] != self.num_features or not x.dtype.is_floating_point:
            raise ValueError(f"rows of {self.num_features} channels are needed")
        if self.training:
            mean, var, n = group_moments(x, self.group)
            self.track(mean, var, n)
        elif self.running_mean is not None:
            mean, var = self.running_mean, self.running_var
            scale = (var + self.eps) ** -0.5
            y = (x - shaped(mean, x)) * shaped(scale, x)
            return y if self.weight is None else y * shaped(self.weight, x) + shaped(self.bias, x)
        else:
            flat = over_channels(x)
            var, mean = torch.var_mean(flat, 1, correction=0)
            y = (x - shaped(mean, x)) * shaped((var + self.eps).rsqrt(), x)
            return y if self.weight is None else y * shaped(self.weight, x) + shaped(self.bias, x)
        moments = mean, var, n
        return Whiten.apply(x, self.weight, self.bias, *moments, self.eps, self.group)

    def track(self, mean, var, n):
        if self.running_mean is None:
            return
        many = n >= 2
        self.num_batches_tracked.copy_(torch.where(many, 1, 0) + self.num_batches_tracked)
        keep = torch.ones_like(n) - (self.momentum or 0.0)
        if self.momentum is None:
            keep = 1 - 1 / self.num_batches_tracked.double()
        new = mean, var * (n / torch.where(many, n - 1, torch.ones_like(n)))
        for old, value in zip((self.running_mean, self.running_var), new, strict=True):
            old.copy_(torch.where(many, keep * old + (1 - keep) * value, old.double()))


def convert_batch_norms(module, group=None, made=None):
    rank_in(group)
    made = {} if made is None else made
    if isinstance(module, SyncBatchNorm):
        return module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if id(module) not in made:
            new = SyncBatchNorm(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                group=group,
            )
            new.weight, new.bias = module.weight, module.bias
            for name, buffer in module.named_buffers():
                setattr(new, name, buffer)
            new.training = module.training
            made[id(module)] = new
        return made[id(module)]
    for name in list(module._modules):
        child = getattr(module, name)
        if child is not None:
            setattr(module, name, convert_batch_norms(child, group, made))
    return module
