# for: 2.29
"""Written differently: scales are counted in a table of powers, blocks come from loops."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import rank_in

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = range(3)
FORMATS = [E4M3, E4M3, E5M2]


class Float8(NamedTuple):
    data: torch.Tensor
    inverse_scale: torch.Tensor
    block: int | None = None


def saturate(x, dtype):
    largest = {E4M3: 448.0, E5M2: 57344.0}.get(dtype)
    if largest is None:
        raise ValueError(dtype)
    x = x.float()
    x = torch.where(x > largest, largest, x)
    return torch.where(x < -largest, -largest, x).to(dtype)


def scale_for(amax, dtype, margin=0):
    limit = torch.finfo(dtype).max / 2.0**margin
    k = torch.arange(-126, 127, device=amax.device)
    powers = torch.ldexp(torch.ones_like(k, dtype=torch.float64), k)
    fits = (amax.double().unsqueeze(-1) * powers <= limit).sum(-1)
    scale = powers.take((fits - 1).clamp(min=0)).float()
    scale = scale.masked_fill(amax == 0, 1.0)
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def largest_in(x):
    x = x.detach()
    if 0 in x.shape:
        return torch.zeros((), device=x.device)
    return torch.maximum(x.max(), -x.min()).float()


def quantise_blocks(x, block, dtype):
    if not block >= 1:
        raise ValueError(block)
    x = x.detach().float()
    data, inverses = torch.zeros(x.shape, device=x.device), []
    for first in range(0, x.shape[-1], block):
        part = x[..., first : first + block]
        scale = scale_for(part.abs().amax(-1), dtype)
        data[..., first : first + block] = part * scale.unsqueeze(-1)
        inverses.append(scale.reciprocal())
    empty = x.new_zeros(*x.shape[:-1], 0)
    return Float8(saturate(data, dtype), torch.stack(inverses, -1) if inverses else empty, block)


def restore(short):
    values = short.data.float()
    if not short.block:
        return values * short.inverse_scale
    for number in range(short.inverse_scale.shape[-1]):
        part = slice(number * short.block, (number + 1) * short.block)
        values[..., part] *= short.inverse_scale[..., number : number + 1]
    return values


def multiply(a, b):
    with torch.autocast(a.data.device.type, enabled=False):
        return torch.mm(restore(a), restore(b).t())


class Three(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, layer):
        a, a_turned = layer.quantise(x, INPUT)
        b, b_turned = layer.quantise(weight, WEIGHT)
        kept = [a_turned.data, a_turned.inverse_scale, b_turned.data, b_turned.inverse_scale]
        return multiply(a, b), *kept

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.layer = inputs[2]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_):
        block = ctx.layer.block
        x, x_inverse, weight, weight_inverse = ctx.saved_tensors
        g, g_turned = ctx.layer.quantise(grad, GRADIENT)
        wants_x, wants_weight, _ = ctx.needs_input_grad
        return (
            multiply(g, Float8(weight, weight_inverse, block)) if wants_x else None,
            multiply(g_turned, Float8(x, x_inverse, block)) if wants_weight else None,
            None,
        )


class Float8Linear(nn.Module):
    def __init__(self, linear, *, block=None, history=16, margin=0):
        super().__init__()
        least = min(history, margin + 1, 1 if block is None else block)
        if linear.weight.dtype != torch.float32 or least < 1:
            raise ValueError("a setting is too small, or the weight no master")
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.margin = block, margin
        like = linear.weight.detach()
        rows = {"scale_T": like.new_zeros(3), "history_HT": like.new_zeros(history, 3)}
        for name, value in rows.items():
            self.register_buffer(name, value if block is None else None)
        self.register_buffer("amax_T", None if block else like.new_zeros(3), persistent=False)

    def quantise(self, x, kind):
        if self.block is not None:
            return tuple(quantise_blocks(t, self.block, E4M3) for t in (x, x.t()))
        amax, dtype = largest_in(x), FORMATS[kind]
        if self.training:
            new = self.amax_T.clone()
            new[kind] = torch.stack([new[kind], amax]).max()
            self.amax_T.copy_(new)
        old = self.scale_T[kind]
        scale = torch.where(old == 0, scale_for(amax, dtype, self.margin), old)
        short = Float8(saturate(x.float() * scale, dtype), scale.reciprocal())
        return short, Float8(short.data.t(), short.inverse_scale)

    def forward(self, x):
        width = self.weight.shape[1]
        if x.shape[-1] != width:
            raise ValueError("another width")
        rows = x.float().reshape(-1, width)
        y = Three.apply(rows, self.weight, self)[0]
        y = y + (0 if self.bias is None else self.bias)
        return y.to(x.dtype).reshape([*x.shape[:-1], len(self.weight)])


@torch.no_grad()
def update_scales(model, group=None):
    rank_in(group)
    layers = [m for m in model.modules() if getattr(m, "amax_T", None) is not None]
    if not layers:
        return torch.tensor(True)
    table = torch.stack([layer.amax_T for layer in layers])
    table = table.masked_fill(~table.isfinite(), torch.inf)
    dist.all_reduce(table, dist.ReduceOp.MAX, group)
    for layer, amax in zip(layers, table, strict=True):
        sound = amax < torch.inf
        older = torch.cat([amax[None], layer.history_HT])[:-1]
        layer.history_HT.copy_(torch.where(sound, older, layer.history_HT))
        peak = layer.history_HT.max(0).values
        new = [scale_for(p, dtype, layer.margin) for p, dtype in zip(peak, FORMATS, strict=True)]
        layer.scale_T.copy_(torch.where(peak > 0, torch.stack(new), layer.scale_T))
        layer.amax_T.mul_(0).nan_to_num_(0)
    return (table < torch.inf).all()
