# for: 3.17
"""Written differently: vectors of the wanted dtype are made first, then filled."""

from __future__ import annotations

import torch
from torch import Tensor

from given.agreement import Group
from given.fsdp_units import Parameters
from solutions.phase3_multi_node.fsdp import FlatParameter

FLOATING = {
    kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype) and kind.is_floating_point
}


class MixedPrecisionFlat(FlatParameter):
    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        for dtype in (compute_dtype, reduce_dtype):
            if not dtype.is_floating_point:
                raise ValueError(f"mixed precision needs floating-point dtypes, got {dtype}")
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        super().__init__(parameters, group, device)

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        kind = self.compute_dtype if dtype in FLOATING else dtype
        super().make_full(kind, device)

    def gather_input(self) -> Tensor:
        own = self.shard.detach().to(self.full.dtype)
        out = own.new_zeros(self.chunk)
        out[: own.numel()].copy_(own)
        return out

    def reduce_input(self) -> Tensor:
        if not self.full.dtype.is_floating_point:
            return super().reduce_input()
        size = self.full.numel()
        out = torch.zeros(size, dtype=self.reduce_dtype, device=self.full.device)
        begin = 0
        for leaf in self.leaves:
            if leaf.grad is not None:
                out[begin : begin + leaf.numel()].copy_(leaf.grad.detach().reshape(-1))
            begin += leaf.numel()
        return out

    def mean(self, chunk: Tensor) -> Tensor:
        wide = torch.empty_like(chunk, dtype=self.shard.dtype)
        wide.copy_(chunk)
        return super().mean(wide)
