"""Training with 8-bit products: two formats, scales, and a linear layer that uses them.

A floating number of 8 bits has few exponents, so a tensor is multiplied by a scale first:

================  ========  =======  ==================  ======================================
format            largest   bits     powers of two       for
================  ========  =======  ==================  ======================================
float8_e4m3fn     448       3 (+1)   2^-9 … 2^8          inputs and weights: precision
float8_e5m2       57344     2 (+1)   2^-16 … 2^15        gradients: range
================  ========  =======  ==================  ======================================

    scale   the largest power of two with amax·scale ≤ largest, amax = max |x|
    data    x·scale, rounded to 8 bits; what is larger becomes ± the largest number
    value   data·inverse, inverse = 1/scale

*Delayed scaling* has one scale per tensor, from the amax of the steps before: one pass over the
tensor is enough. *Block scaling* has one scale per block of a row, from the block itself. An
outlier then costs its block the small values, and not the whole tensor. A power of two changes the
exponent alone, so scaling itself rounds nothing.

Products take 8-bit operands and add up in float32. Here float32 products of the restored values
stand for those of the chip: each value is exact there. Weights, their gradients and the
optimizer stay float32 (master weights, 2.5). Per step and rank: one all-reduce of 12 bytes per
layer with delayed scaling. Invariant: scales and histories are equal on all ranks. The host never
reads from the device.

Shapes: N rows of a layer's input, K its features, M features out, T = 3 kinds of tensors, H steps.
Sources: Micikevicius et al. 2022 (arXiv 2209.05433), sections 2 and 3 (scales, formats); NVIDIA's
Transformer Engine (delayed scaling); DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437), section 3.3
(blocks, e4m3 for all); OCP Microscaling Formats specification 1.0, section 5 (powers of two).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, rank_in

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INPUT, WEIGHT, GRADIENT = range(3)
FORMATS = (E4M3, E4M3, E5M2)  # of the three kinds, with delayed scaling


class Float8(NamedTuple):
    """A tensor in 8 bits: its values are ``data`` times ``inverse_scale``."""

    data: Tensor  # float8
    inverse_scale: Tensor  # float32 powers of two: without dimensions, or (…, ⌈K/block⌉)
    block: int | None = None  # elements of the last dimension that share a scale; None: all


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the 8-bit ``dtype``: rounded to the nearest number, of two equally near to the even.

    What is beyond the largest number becomes the largest one, with its sign; infinities, too. NaN
    stays NaN. It computes in float32: float64 is rounded to that first. ``x`` stays as it is.
    ValueError unless ``dtype`` is E4M3 or E5M2.
    """
    # --- exercise 2.29: start
    # Step 1: torch's cast makes inf of a large e5m2; of a large e4m3 some versions make NaN
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"{dtype} is neither {E4M3} nor {E5M2}")
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)
    # --- exercise 2.29: end


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The largest power of two with amax·scale·2^margin ≤ the largest number of ``dtype``.

    ``amax``: any shape, float32, not negative. The scale has its shape, float32, and is between
    2^-126 and 2^126, so that it and its inverse are normal numbers. It is 1 where ``amax`` is zero,
    and NaN where ``amax`` is infinite or NaN.
    """
    # --- exercise 2.29: start
    # Step 2: amax = m·2^e with m in [0.5, 1), and so the largest number; a logarithm would round
    # Step 3: a float32 with exponent k has the bits (k + 127) << 23
    most, top = math.frexp(torch.finfo(dtype).max)
    m, e = amax.frexp()
    k = (top - e - (m > most).int() - margin).clamp(-126, 126)
    scale = ((k + 127) << 23).view(torch.float32)
    scale = scale.where(amax > 0, 1.0)
    return scale.where(amax.isfinite(), torch.nan)
    # --- exercise 2.29: end


def largest_in(x: Tensor) -> Tensor:
    """max |x| in float32, without dimensions: zero if ``x`` is empty, NaN if it has a NaN."""
    # --- exercise 2.29: start
    # Step 4: a maximum of nothing raises
    return x.detach().abs().max().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    # --- exercise 2.29: end


def quantise_blocks(x: Tensor, block: int, dtype: torch.dtype) -> Float8:
    """``x`` (…, K) in 8 bits, with a scale for each ``block`` elements of the last dimension.

    The last block of a row has the rest, if ``block`` does not divide K. Each scale is
    ``scale_for`` of the block's own amax. A block with an infinity or NaN becomes NaN whole, and
    so does its inverse scale. ``data`` has the shape of ``x``. ValueError if ``block`` is below 1.
    """
    # --- exercise 2.29: start
    # Step 5: fill the last block with zeros, which change no amax, and cut them off again: a slice
    #         alone keeps their memory
    if block < 1:
        raise ValueError(f"a block has at least one element, not {block}")
    width = x.shape[-1]
    count = -(-width // block)
    x = F.pad(x.detach().float(), (0, count * block - width)).unflatten(-1, (count, block))
    scale = scale_for(x.abs().amax(-1), dtype)
    data = saturate(x * scale.unsqueeze(-1), dtype).flatten(-2)
    return Float8(data[..., :width].clone(), scale.reciprocal(), block)
    # --- exercise 2.29: end


def restore(short: Float8) -> Tensor:
    """The values in float32: ``data`` times ``inverse_scale``.

    Only numbers below 2^-126 are rounded.
    """
    # --- exercise 2.29: start
    # Step 6: give each element the inverse scale of its block
    inverse = short.inverse_scale
    if short.block is not None:
        inverse = inverse.repeat_interleave(short.block, -1)[..., : short.data.shape[-1]]
    return short.data.float() * inverse
    # --- exercise 2.29: end


def multiply(a: Float8, b: Float8) -> Tensor:
    """a·bᵀ in float32, also under autocast, for ``a`` (N, K) and ``b`` (M, K): (N, M).

    Both have the dimension that is summed over as their last one: blocks lie along it, and the
    8-bit products of chips ask for it.
    """
    # --- exercise 2.29: start
    # Step 7: switch autocast off for the device of the operands
    with torch.autocast(a.data.device.type, enabled=False):
        return restore(a) @ restore(b).T
    # --- exercise 2.29: end


class _Products(torch.autograd.Function):
    """The three products of a linear layer: x·wᵀ, and backward grad·w and gradᵀ·x."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, layer: Float8Linear) -> Tensor:
        """(N, M) float32. Keeps the two 8-bit tensors that backward multiplies."""
        # --- exercise 2.29: start
        # Step 8: forward sums over K, backward over M and N; keep what is needed there
        x8, x8_t = layer.quantise(x_NK, INPUT)
        w8, w8_t = layer.quantise(weight_MK, WEIGHT)
        ctx.layer = layer
        ctx.save_for_backward(x8_t.data, x8_t.inverse_scale, w8_t.data, w8_t.inverse_scale)
        return multiply(x8, w8)
        # --- exercise 2.29: end

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the weight, float32; None for one that nobody needs."""
        # --- exercise 2.29: start
        # Step 9: both products read the gradient in 8 bits
        data, inverse, weight_data, weight_inverse = ctx.saved_tensors
        g8, g8_t = ctx.layer.quantise(grad_NM, GRADIENT)
        grads: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            grads[0] = multiply(g8, Float8(weight_data, weight_inverse, ctx.layer.block))
        if ctx.needs_input_grad[1]:
            grads[1] = multiply(g8_t, Float8(data, inverse, ctx.layer.block))
        return tuple(grads)
        # --- exercise 2.29: end


class Float8Linear(nn.Module):
    """``linear`` with 8-bit products, forward and backward.

    ``weight`` and ``bias`` are the parameters of ``linear``, the same objects, in float32: the
    optimizer steps these masters, and each forward makes 8 bits of them anew. The bias is added in
    float32.

    ``block`` None: delayed scaling, in FORMATS. ``scale_T`` (3,) float32 has the scales for input,
    weight and gradient. While one is zero, as at first, the tensor's own amax gives the scale. In
    training ``amax_T`` (3,) becomes the largest |x| since ``update_scales``, over several forwards
    and backwards; evaluation leaves it. ``history_HT`` (``history``, 3) has the amax of the last
    steps, newest first. ``scale_T`` and ``history_HT`` are in the state_dict. ``margin``: bits of
    room in each scale, for a tensor that grows.

    ``block`` a number: block scaling in e4m3 for all three, always with the blocks along the
    dimension that a product sums over. Nothing is remembered, and these three are None.

    ValueError if the weight is not float32, or if ``block`` or ``history`` is below 1 or ``margin``
    below 0.
    """

    scale_T: Tensor
    amax_T: Tensor
    history_HT: Tensor

    def __init__(
        self, linear: nn.Linear, *, block: int | None = None, history: int = 16, margin: int = 0
    ) -> None:
        super().__init__()
        if linear.weight.dtype != torch.float32:
            raise ValueError(f"the masters are {linear.weight.dtype}, and must be float32")
        if (block is not None and block < 1) or history < 1 or margin < 0:
            raise ValueError(f"{block=}, {history=} or {margin=} is too small")
        self.weight, self.bias = linear.weight, linear.bias
        self.block, self.margin = block, margin
        # --- exercise 2.29: start
        # Step 10: three buffers on the weight's device; the amax of an unfinished step is no state
        delayed = block is None
        zeros = self.weight.new_zeros(history + 2, 3).detach()
        self.register_buffer("scale_T", zeros[0].clone() if delayed else None)
        self.register_buffer("amax_T", zeros[1].clone() if delayed else None, persistent=False)
        self.register_buffer("history_HT", zeros[2:].clone() if delayed else None)
        # --- exercise 2.29: end

    def quantise(self, x_RC: Tensor, kind: int) -> tuple[Float8, Float8]:
        """``x`` (R, C) and its transpose (C, R) in 8 bits; ``kind``: INPUT, WEIGHT or GRADIENT.

        Each of the two has its own blocks along its last dimension. With delayed scaling both are
        one tensor, seen in two ways.
        """
        # --- exercise 2.29: start
        # Step 11: blocks need two tensors: numbers that share a row do not share a column
        # Step 12: without a look at values, take the old scale or that of this tensor
        if self.block is not None:
            rows, columns = (quantise_blocks(x, self.block, E4M3) for x in (x_RC, x_RC.T))
            return rows, columns
        amax, dtype = largest_in(x_RC), FORMATS[kind]
        if self.training:
            self.amax_T[kind] = torch.maximum(self.amax_T[kind], amax)
        known = self.scale_T[kind]
        scale = known.where(known > 0, scale_for(amax, dtype, self.margin))
        data, inverse = saturate(x_RC.float() * scale, dtype), scale.reciprocal()
        return Float8(data, inverse), Float8(data.T, inverse)
        # --- exercise 2.29: end

    def forward(self, x: Tensor) -> Tensor:
        """x·weightᵀ + bias (…, M) in the dtype of ``x`` (…, K), for any number of rows, also none.

        Gradients reach ``x`` in its dtype, and weight and bias in float32. Until backward a layer
        keeps one byte per element of ``x`` and of the weight, and the inverse scales. ValueError if
        ``x`` has another number of features.
        """
        # --- exercise 2.29: start
        # Step 13: rows in float32, then the products, then the bias
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"{x.shape[-1]} features for a layer with {self.weight.shape[1]}")
        x_NK = x.reshape(-1, x.shape[-1]).float()
        y_NM = _Products.apply(x_NK, self.weight, self)
        if self.bias is not None:
            y_NM = y_NM + self.bias
        return y_NM.to(x.dtype).view(*x.shape[:-1], y_NM.shape[1])
        # --- exercise 2.29: end


@torch.no_grad()
def update_scales(model: nn.Module, group: Group = None) -> Tensor:
    """After backward, once per step: next scales of all layers of ``model`` with delayed scaling.

    All ranks of ``group`` call it with the same model, also a rank that had no rows. One all-reduce
    of 12 bytes per layer finds the largest amax of the ranks. It becomes the newest entry of
    ``history_HT``, the oldest one goes, and ``scale_T`` is ``scale_for`` of the largest entry, with
    the layer's margin. It stays as it was while all entries are zero. Then ``amax_T`` is zero.

    An infinite or NaN amax of one rank leaves history and scale of that tensor on all ranks as they
    were. Returns a bool without dimensions, equal on all ranks: whether every amax was finite. If
    not, the gradients are wrong somewhere, and all ranks leave out the optimizer's step. The host
    does not wait. A model without such layers sends nothing, and gives True. ValueError, before
    anything is sent, if this process is not in ``group``.
    """
    # --- exercise 2.29: start
    # Step 14: a maximum may lose a NaN on its way; an infinity arrives
    # Step 15: then every layer moves its history on
    rank_in(group)
    layers = [m for m in model.modules() if isinstance(m, Float8Linear) and m.block is None]
    if not layers:
        return torch.tensor(True)
    amax_LT = torch.stack([layer.amax_T for layer in layers])
    amax_LT = amax_LT.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(amax_LT, dist.ReduceOp.MAX, group=group)
    for layer, amax_T in zip(layers, amax_LT, strict=True):
        finite_T = amax_T.isfinite()
        moved_HT = torch.cat([amax_T.unsqueeze(0), layer.history_HT[:-1]])
        layer.history_HT.copy_(moved_HT.where(finite_T, layer.history_HT))
        most_T = layer.history_HT.amax(0)
        scales = [scale_for(m, f, layer.margin) for m, f in zip(most_T, FORMATS, strict=True)]
        layer.scale_T.copy_(torch.stack(scales).where(most_T > 0, layer.scale_T))
        layer.amax_T.zero_()
    return amax_LT.isfinite().all()
    # --- exercise 2.29: end
