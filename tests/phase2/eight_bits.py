"""What the checks of 8-bit training share: both formats by their tables, scales by search."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.phase2.half_precision import seeded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
DELAYED = (E4M3, E4M3, E5M2)  # input, weight, gradient
ROWS, INNER, OUTER = 7, 11, 5  # N, K, M of the checks' layers


def table(dtype: torch.dtype) -> Tensor:
    """All numbers of the format from zero to its largest, in float64; the place is the code."""
    every = torch.arange(127, dtype=torch.uint8).view(dtype).double()
    return every[every <= LARGEST[dtype]]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of the format, in float64, found in its table; ties go to even codes."""
    x = x.detach().cpu().float().double()
    numbers = table(dtype)
    size = x.abs().clamp(max=LARGEST[dtype])
    above = torch.searchsorted(numbers, size.nan_to_num()).clamp(1, len(numbers) - 1)
    low, high = size - numbers[above - 1], numbers[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    found = torch.where(up, numbers[above], numbers[above - 1]).copysign(x)
    return found.where(~x.isnan(), torch.nan)


def scale_of(amax: float, dtype: torch.dtype, margin: int = 0) -> float:
    """The largest power of two from 2^-126 to 2^126 that keeps ``amax`` in range, by trying all."""
    if not math.isfinite(amax):
        return math.nan
    fits = [k for k in range(-126, 127) if math.ldexp(amax, k + margin) <= LARGEST[dtype]]
    return math.ldexp(1.0, fits[-1] if fits else -126) if amax else 1.0


def largest(x: Tensor) -> float:
    """max |x|, NaN if there is one, zero of nothing."""
    x = x.detach().double()
    return math.nan if bool(x.isnan().any()) else max(x.abs().flatten().tolist(), default=0.0)


def in_tensor(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The values that 8 bits and one scale leave of ``x``, in float64."""
    return rounded(x.detach().cpu().float().double() * scale, dtype) / scale


def in_blocks(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The same with a scale for each block of the last dimension, in float64."""
    x = x.detach().cpu().float()
    out = torch.empty(x.shape, dtype=torch.float64)
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    for row, into in zip(x.reshape(shape), out.view(shape), strict=True):
        for first in range(0, len(row), block):
            part = row[first : first + block]
            into[first : first + block] = in_tensor(part, dtype, scale_of(largest(part), dtype))
    return out


class Wanted(NamedTuple):
    """A tensor that a layer gives, and the sum of its terms' absolute values, in float64."""

    value: Tensor
    size: Tensor


def product(a: Tensor, b: Tensor, more: Tensor | float = 0.0) -> Wanted:
    """a·b + more, and the same of absolute values."""
    return Wanted(a @ b + more, a.abs() @ b.abs() + abs(more) + 1e-30)


def products(
    x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, block: int | None, scales: list[float]
) -> dict[str, Wanted]:
    """y and the three gradients of a layer, from 8-bit operands; scales of 0: from the tensors."""
    tensors = (x, weight, grad)
    if block:
        x8, w8, g8 = (in_blocks(t, block, E4M3) for t in tensors)
        x8_t, w8_t, g8_t = (in_blocks(t.T, block, E4M3).T for t in tensors)
    else:
        known = [
            s or scale_of(largest(t), d) for s, t, d in zip(scales, tensors, DELAYED, strict=True)
        ]
        x8, w8, g8 = (in_tensor(t, d, s) for t, d, s in zip(tensors, DELAYED, known, strict=True))
        x8_t, w8_t, g8_t = x8, w8, g8
    grad = grad.double()
    return {
        "y": product(x8, w8.T, bias.detach().double()),
        "x": product(g8, w8_t),
        "weight": product(g8_t.T, x8_t),
        "bias": Wanted(grad.sum(0), grad.abs().sum(0) + 1e-30),
    }


def linear(seed: int, inner: int = INNER, outer: int = OUTER, *, bias: bool = True) -> nn.Linear:
    """A float32 layer, the same on every rank."""
    return seeded(seed, lambda: nn.Linear(inner, outer, bias=bias))
