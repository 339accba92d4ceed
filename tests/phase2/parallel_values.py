"""What the checks of tensor and sequence parallelism share: inputs, a rule for one mistake."""

from __future__ import annotations

import torch

from distlab.explain.case import Case, Diagnosis, Rule
from distlab.reference.workloads import Block


def values(seed: int, salt: int, *shape: int) -> torch.Tensor:
    """Numbers of that shape, the same on every rank, in float64."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values behind other strides."""
    return x.t().contiguous().t()


def whole_block(seed: int, width: int, heads: int, dtype: torch.dtype = torch.float64) -> Block:
    """All weights different and far from zero, biases and norms too."""
    block = Block(width, heads)
    for salt, p in enumerate(block.parameters(), 30):
        p.data = (values(seed, salt, *p.shape) * (0.2 if p.ndim == 2 else 0.5)).to(dtype)
    return block


def summed_again(right: torch.Tensor, times: int) -> tuple[Rule]:
    """A rule: every rank had this gradient already, and it was summed over the ranks."""

    def rule(case: Case) -> Diagnosis | None:
        if times == 1 or not case.fits(right * times):
            return None
        text = f"the gradient is {times} times too large: every rank has it already, don't sum it"
        return Diagnosis("gradient-summed", text)

    return (rule,)
