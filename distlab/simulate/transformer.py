"""Parts of a transformer's implementation that a plan can choose: dropout, and unfused attention.

*Written* attention is that of programs before 2022: a product for the scores, a kernel for scale,
mask and softmax, dropout, and a product with the values. It keeps 5 bytes per score for backward in
16 bits: softmax and its dropout 2 each, the mask of dropout 1. Selective recomputation keeps none
of them. Sources: Shoeybi et al. 2019 (arXiv 1909.08053); Korthikanti et al. 2022 (arXiv
2205.05198), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RESIDUAL = ("out", "down")  # the last product of attention and of the MLP

Attention = Callable[..., Tensor]


def written_attention(dropout: float, again: bool) -> Attention:
    """A function in place of ``scaled_dot_product_attention``; ``again``: computed again in
    backward."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # one kernel for scale, mask and softmax, as Megatron's: it costs what softmax costs
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        return dropped(weights, dropout) @ value

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if not again:
            return attend(query, key, value)
        kept: Tensor = checkpoint(
            attend, query, key, value, use_reentrant=False, preserve_rng_state=False
        )
        return kept

    return attention


def dropped(x: Tensor, p: float) -> Tensor:
    """Dropout as a GPU's one kernel, whose mask has a byte per element."""
    return torch.native_dropout(x, p, True)[0] if p else x


def drop_out(model: nn.Module, p: float, embedding: Iterable[nn.Module] = ()) -> None:
    """Dropout before each residual sum of the blocks in ``model``, and after ``embedding``."""
    layers = [m for name, m in model.named_modules() if name.rpartition(".")[2] in RESIDUAL]
    for layer in (*layers, *embedding):
        layer.register_forward_hook(partial(_drop, p))


def _drop(p: float, _: nn.Module, __: Any, out: Tensor) -> Tensor:
    return dropped(out, p)
