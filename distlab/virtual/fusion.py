"""Operators that one kernel does together, where a program calls them one by one.

A kernel that takes the result of the kernel before it finds that result in registers: it is neither
written to memory nor read again. So a fused chain moves 2 n bytes less for each result of n bytes
that stays inside, and its host launches one kernel. ``RULES`` names the operators of each rule.

*residual*: bias, dropout and the residual sum (arXiv 2104.04473, section 4.2). *pointwise*: every
chain of elementwise operators, as a compiler fuses them (``torch.compile``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

RESIDUAL: tuple[Any, ...] = (torch.ops.aten.add, torch.ops.aten.native_dropout)
RULES: dict[str, Callable[[Any], bool]] = {
    "residual": lambda func: func.overloadpacket in RESIDUAL,
    "pointwise": lambda func: torch.Tag.pointwise in func.tags or func.overloadpacket in RESIDUAL,
}


class Fusion:
    """Follows one rank's kernels; ``rules``: names in ``RULES``."""

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules = [RULES[name] for name in rules]
        self.known: dict[Any, bool] = {}
        self.last: weakref.ref[Tensor] | None = None  # of the kernel before, if it can be fused

    def left(self, func: Any, args: Any, kwargs: Any, out: Any) -> float | None:
        """The share of the operator's bytes that still moves; None if it is a kernel of its own."""
        can = self.known.get(func)
        if can is None:
            can = self.known[func] = any(rule(func) for rule in self.rules)
        before = self.last() if self.last is not None else None
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.last = weakref.ref(made[0]) if can and made else None
        if not can or before is None or not any(t is before for t in given):
            return None
        moved = sum(t.nbytes for t in (*given, *made))
        return max(0.0, 1 - 2 * before.nbytes / moved)
