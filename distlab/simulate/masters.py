"""16-bit weights with float32 gradients and float32 copies in the optimizer: 18 bytes a parameter.

Weights 2, the sum of the gradients 4, the copy 4, AdamW's two moments 8. The gradients' memory
stays from step to step. Sources: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.1;
Megatron-LM's main gradients (megatron/optimizer/optimizer.py, v2.5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def can_be() -> bool:
    """Whether this torch lets a 16-bit parameter have a float32 gradient: 2.10 and newer."""
    return hasattr(torch.Tensor, "grad_dtype")


class Masters:
    """An optimizer of 16-bit ``parameters`` by ``make``'s of their float32 copies."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.parameters = list(parameters)
        self.inner = make([nn.Parameter(p.detach().float()) for p in self.parameters])
        for p in self.parameters:
            p.grad_dtype = torch.float32
            p.grad = torch.zeros_like(p, dtype=torch.float32)

    @property
    def copies(self) -> list[nn.Parameter]:
        """The float32 copies, in the order of the parameters."""
        return [p for group in self.inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients to zero in place, whatever ``set_to_none`` is."""
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def step(self) -> None:
        """Update the copies, then round them to the weights."""
        copies = self.copies
        for p, copy in zip(self.parameters, copies, strict=True):
            copy.grad = p.grad
        self.inner.step()
        for copy in copies:
            copy.grad = None
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, copies)


def optimizer_of(
    parameters: Iterable[nn.Parameter],
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    fused: bool,
    masters: bool,
) -> Any:
    """``make``'s optimizer, with float32 copies if the plan has them."""
    trained = [p for p in parameters if p.requires_grad]
    optimizer: Any = Masters(trained, make) if masters else make(trained)
    updates: Any = optimizer.inner if masters else optimizer
    updates.runs_fused = fused
    return optimizer
