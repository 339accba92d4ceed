"""Functions of torch that meta tensors need to be others, for a process that is a child."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def skip_initial_values() -> None:
    """Let the functions of ``torch.nn.init`` leave meta tensors alone. For this process."""

    def skipping(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor if tensor.is_meta else fill(tensor, *args, **kwargs)

        return call

    for name, fill in list(vars(torch.nn.init).items()):
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch.nn.init, name, skipping(fill))


def use_fused_functions() -> None:
    """Two functions that on meta tensors don't reach the dispatcher as they would on a GPU.

    Attention becomes the one operator that a GPU would run. ``torch.tensor(…, device="meta")``
    makes its tensor on the CPU first, so that its values are known. Both are replaced for this
    process, which is a child.
    """
    # `with torch.device("meta")` knows functions as they are at its first use in a process, which
    # may have been long ago: use it before they are replaced, so that it always knows the same
    with torch.device("meta"):
        torch.empty(0)
    attention, tensor = torch.nn.functional.scaled_dot_product_attention, torch.tensor

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,  # nn.MultiheadAttention gives these three by position
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not query.is_meta or attn_mask is not None or kwargs.get("enable_gqa"):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal)[0]
        return out

    def known(data: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or "cpu").type != "meta":
            return tensor(data, **kwargs)
        return tensor(data, **kwargs | {"device": "cpu"}).to("meta")

    torch.nn.functional.scaled_dot_product_attention = fused
    torch.tensor = known
