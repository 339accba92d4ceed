"""Linear layers that multiply in fp8, one scale per tensor, as Transformer Engine runs them.

A layer has three products: with the weight, and in backward with the weight and with the input.
Hopper's 8-bit products read both factors along the dimension that is summed. So one kernel casts a
tensor and also writes its transpose. Scales are delayed: the maxima come from steps before, so no
kernel looks for them. Everything but these products stays in 16 bits. Gradients are e5m2 on a GPU,
whose products take the same time as e4m3's.

Sources: Micikevicius et al. 2022 (arXiv 2209.05433), section 3; NVIDIA Transformer Engine, "Using
FP8 with Transformer Engine" (delayed scaling, transposed copies).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

EIGHT = "float8_e4m3fn"  # the dtype in a cluster's file
MULTIPLE = 16  # of which the sizes of an 8-bit product must be multiples
Cast = tuple[Tensor, Tensor]


@torch.library.custom_op("distlab::cast_transpose", mutates_args=())
def cast_transpose(x_RC: Tensor) -> Cast:
    """An 8-bit copy and its transpose: one kernel, which reads ``x_RC`` once."""
    raise NotImplementedError("only its sizes are known: it runs on meta tensors")


@cast_transpose.register_fake
def _(x_RC: Tensor) -> Cast:
    rows, columns = x_RC.shape
    eight = getattr(torch, EIGHT)
    return x_RC.new_empty(rows, columns, dtype=eight), x_RC.new_empty(columns, rows, dtype=eight)


def times(a_RC: Tensor, b_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """a · bᵀ of 8-bit factors in another dtype."""
    one = torch.empty(1, dtype=torch.float32, device="meta")
    return torch._scaled_mm(a_RC, b_NC.t(), one, one, out_dtype=dtype)


class EightBitProduct(torch.autograd.Function):
    """x · weightᵀ; it keeps the transposed 8-bit copies of both for backward."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, weight_NC: Tensor, dtype: torch.dtype) -> Tensor:
        x8_RC, x8_CR = cast_transpose(x_RC)
        w8_NC, w8_CN = cast_transpose(weight_NC)
        ctx.save_for_backward(x8_CR, w8_CN)
        ctx.dtypes = x_RC.dtype, weight_NC.dtype
        return times(x8_RC, w8_NC, dtype)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, Tensor, None]:
        x8_CR, w8_CN = ctx.saved_tensors
        g8_RN, g8_NR = cast_transpose(grad_RN)
        to_x, to_weight = ctx.dtypes
        return times(g8_RN, w8_CN, to_x), times(g8_NR, x8_CR, to_weight), None


def product(layer: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    """The layer's forward."""
    y_RN = EightBitProduct.apply(x.flatten(0, -2), layer.weight, dtype)
    if layer.bias is not None:
        y_RN = y_RN + layer.bias.to(dtype)
    return y_RN.unflatten(0, x.shape[:-1])


def in_eight_bits(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let the linear layers of ``blocks`` multiply in 8 bits; their results have ``dtype``."""
    for layer in (m for block in blocks for m in block.modules() if type(m) is nn.Linear):
        if layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0:
            layer.forward = partial(product, layer, dtype)
