"""One operator on given shapes: its cost, and how to make its results again without running it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .kernel_time import NOTHING, Cost
from .shadows import set_shadow, shadow_of


@dataclass
class Call:
    """One operator on given shapes: cost, FLOPs, and how to make its results again.

    ``made``: shape, stride and dtype of each new tensor, None for a result that is None. ``first``:
    the result is the first argument, changed in place. ``given``: it is the argument ``out``.
    """

    repeatable: bool
    first: bool = False
    given: bool = False
    several: type | None = None
    made: list[tuple[Any, Any, torch.dtype] | None] = field(default_factory=list)
    out: Any = None
    cost: Cost = NOTHING
    flops: float = 0.0

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, out: Any) -> Call:
        """The call that gave ``out``; not repeatable if a value or a view might be in it."""
        if isinstance(out, Tensor) and out is kwargs.get("out"):
            return cls(repeatable=out.is_meta, given=True, out=out)
        if args and out is args[0] and isinstance(out, Tensor):
            return cls(repeatable=out.is_meta, first=True, out=out)
        outs = [out] if isinstance(out, Tensor) else out
        plain = isinstance(outs, (list, tuple)) and all(
            t is None or (isinstance(t, Tensor) and t.is_meta and shadow_of(t) is None)
            for t in outs
        )
        mutates = any(a.alias_info is not None for a in func._schema.returns)
        if not plain or mutates:
            return cls(repeatable=False, out=out)
        made = [None if t is None else (t.shape, t.stride(), t.dtype) for t in outs]
        several = None if isinstance(out, Tensor) else type(out)
        return cls(repeatable=True, several=several, made=made, out=out)

    def repeat(self, args: Any, kwargs: Any) -> Any:
        """The results of the same call."""
        if self.first or self.given:
            changed = args[0] if self.first else kwargs["out"]
            set_shadow(changed, None)
            return changed
        outs = [m and torch.empty_strided(m[0], m[1], dtype=m[2], device="meta") for m in self.made]
        return outs[0] if self.several is None else self.several(outs)


def call_key(func: Any, args: Any, kwargs: Any) -> Any:
    """The key that decides the result of an operator on meta tensors; None if values might decide
    it.

    One tensor of unknown values is enough to make the results' values unknown as well.
    """
    unknown: list[bool] = []
    key = func, _key(args, unknown), _key(tuple(kwargs.items()), unknown)
    return key if True in unknown and None not in unknown else None


def _key(value: Any, unknown: list[Any]) -> Any:
    if isinstance(value, Tensor):
        unknown.append(shadow_of(value) is None if value.is_meta else None)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, unknown) for item in value])
    return value if value.__hash__ else repr(value)
