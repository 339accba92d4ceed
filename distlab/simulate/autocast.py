"""``torch.autocast`` for meta tensors, for which torch has none.

Products, convolutions and attention get 16-bit copies of their inputs; a parameter's copy is made
once per step. Losses and softmax compute in float32. The lists are parts of torch's own
(docs/source/amp.rst, "CUDA Op-Specific Behavior", torch 2.15).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

NARROW = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, Tensor.matmul}
WIDE = {F.cross_entropy, F.softmax, F.log_softmax, F.layer_norm, F.nll_loss}


class Autocast(TorchFunctionMode):
    """While it is entered, float32 tensors reach the operators of ``NARROW`` in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.copies: dict[Tensor, Tensor] = {}

    def __exit__(self, *exc: object) -> None:
        self.copies.clear()
        super().__exit__(*exc)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        if func in NARROW:
            given = tree_map_only(Tensor, self.narrow, given)
        elif func in WIDE:
            given = tree_map_only(Tensor, self.wide, given)
        return func(*given[0], **given[1])

    def narrow(self, tensor: Tensor) -> Tensor:
        """The tensor in 16 bits."""
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self.dtype)
        if tensor not in self.copies:
            self.copies[tensor] = tensor.to(self.dtype)
        return self.copies[tensor]

    def wide(self, tensor: Tensor) -> Tensor:
        """The tensor in float32."""
        return tensor.float() if tensor.is_floating_point() else tensor
