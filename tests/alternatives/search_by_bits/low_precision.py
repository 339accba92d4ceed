# for: 2.29
"""Written differently: numbers come from a table of codes, scales are tried and corrected."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import rank_in

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = 0, 1, 2
FORMATS = (E4M3, E4M3, E5M2)


class Float8(NamedTuple):
    data: torch.Tensor
    inverse_scale: torch.Tensor
    block: int | None = None


def codes(dtype, device):
    """All numbers from zero up to the largest; their places are their codes."""
    every = torch.arange(127, dtype=torch.uint8, device=device).view(dtype).float()
    return every[: 127 if dtype == E4M3 else 124]


def saturate(x, dtype):
    if dtype != E4M3 and dtype != E5M2:
        raise ValueError("not a format of 8 bits")
    x = x.float()
    numbers = codes(dtype, x.device)
    size = x.abs().contiguous()
    above = torch.searchsorted(numbers, size).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    middle = (low + high) / 2  # exact
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code = torch.where(up, above, above - 1)
    code = torch.where(x.isnan(), 0x7F, code)
    return torch.where(x.signbit(), code + 128, code).to(torch.uint8).view(dtype)


def powers(k):
    return torch.ldexp(torch.ones_like(k, dtype=torch.float64), k)


def scale_for(amax, dtype, margin=0):
    largest = torch.finfo(dtype).max
    wide = amax.double() * 2.0**margin
    sound = (amax > 0) & amax.isfinite()
    k = (largest / wide.where(sound, 1.0)).log2().round().int() + 1
    for _ in range(3):  # one of these is the last that fits
        k = torch.where(wide.where(sound, 0.0) * powers(k) > largest, k - 1, k)
    scale = powers(k.clamp(min=-126, max=126)).float()
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def largest_in(x):
    x = x.detach().float().flatten()
    return torch.cat([x.abs(), x.new_zeros(1)]).amax()


def quantise_blocks(x, block, dtype):
    if block <= 0:
        raise ValueError("empty blocks")
    parts, inverses = [], []
    for part in x.detach().float().split(block, -1) if x.shape[-1] else []:
        amax = part.abs().amax(-1)
        scale = scale_for(amax, dtype)
        parts.append(saturate(part * scale[..., None], dtype).view(torch.uint8))
        inverses.append(1 / scale)
    if not parts:
        nothing = x.new_zeros(x.shape, dtype=torch.float32)
        return Float8(nothing.to(dtype), nothing, block)
    return Float8(torch.cat(parts, -1).view(dtype), torch.stack(inverses, -1), block)


def restore(short):
    values = short.data.to(torch.float32)
    if short.block is None:
        return values * short.inverse_scale
    places = torch.arange(values.shape[-1], device=values.device) // short.block
    return values * short.inverse_scale[..., places]


@torch.no_grad()
def multiply(a, b):
    with torch.autocast(a.data.device.type, enabled=False):
        return torch.einsum("nk,mk->nm", restore(a), restore(b))


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        pairs = layer.quantise(x, INPUT), layer.quantise(weight, WEIGHT)
        ctx.layer, ctx.mark = layer, [second.block for _, second in pairs]
        ctx.save_for_backward(*(t for _, second in pairs for t in second[:2]))
        return multiply(pairs[0][0], pairs[1][0])

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        x, weight = Float8(*saved[:2], ctx.mark[0]), Float8(*saved[2:], ctx.mark[1])
        straight, turned = ctx.layer.quantise(grad, GRADIENT)
        to_x = multiply(straight, weight) if ctx.needs_input_grad[0] else None
        to_weight = multiply(turned, x) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None


class Float8Linear(nn.Module):
    def __init__(self, linear, *, block=None, history=16, margin=0):
        super().__init__()
        if linear.weight.dtype is not torch.float32 or margin < 0 or history < 1:
            raise ValueError("not a master, or bad settings")
        if block is not None and block < 1:
            raise ValueError("empty blocks")
        self.weight, self.bias, self.block, self.margin = linear.weight, linear.bias, block, margin
        here = linear.weight.device
        for name, shape in (("scale_T", (3,)), ("amax_T", (3,)), ("history_HT", (history, 3))):
            value = None if block else torch.zeros(shape, device=here)
            self.register_buffer(name, value, persistent=name != "amax_T")

    def quantise(self, x, kind):
        if self.block:
            whole = x.detach()
            return (
                quantise_blocks(whole, self.block, E4M3),
                quantise_blocks(whole.T, self.block, E4M3),
            )
        amax = largest_in(x)
        if self.training:
            now = torch.zeros_like(self.amax_T)
            now[kind] = amax
            self.amax_T.copy_(self.amax_T.maximum(now))
        scale = self.scale_T[kind].clone()
        scale = torch.where(scale == 0, scale_for(amax, FORMATS[kind], self.margin), scale)
        data = saturate(x.float() * scale, FORMATS[kind])
        return Float8(data, 1 / scale), Float8(data.mT, 1 / scale)

    def forward(self, x):
        outs, ins = self.weight.shape
        if x.shape[-1] != ins:
            raise ValueError("another width")
        rows = x.float().flatten(0, -2) if x.dim() > 1 else x[None].float()
        y = Multiply.apply(rows, self.weight, self)
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).reshape((*x.shape[:-1], outs))


@torch.no_grad()
def update_scales(model, group=None):
    rank_in(group)
    layers = [m for m in model.modules() if isinstance(m, Float8Linear) and not m.block]
    if not layers:
        return torch.ones((), dtype=torch.bool)
    flat = torch.cat([layer.amax_T for layer in layers])
    flat = torch.where(flat.isnan(), torch.inf, flat)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    for number, layer in enumerate(layers):
        amax = flat[3 * number : 3 * number + 3]
        rolled = layer.history_HT.roll(1, 0)
        rolled[0] = amax
        good = amax.isfinite()
        layer.history_HT.copy_(torch.where(good, rolled, layer.history_HT))
        for kind, dtype in enumerate(FORMATS):
            most = layer.history_HT[:, kind].max()
            new = scale_for(most, dtype, layer.margin)
            layer.scale_T[kind] = torch.where(most == 0, layer.scale_T[kind], new)
        layer.amax_T.fill_(0)
    return ~flat.isinf().any()
