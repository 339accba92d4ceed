"""How the delivery of a transfer moves values; parts come in the order of the group.

Where not all ranks run, a part stands at several positions. Its values are written only at its own.

Reductions combine in the order of the ranks, so their result does not depend on the order of
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .part import Part
from .shadows import set_shadow, shadow

COMBINE: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (ReduceOp.SUM, torch.Tensor.add_),
    (ReduceOp.AVG, torch.Tensor.add_),
    (ReduceOp.PRODUCT, torch.Tensor.mul_),
    (ReduceOp.MIN, lambda a, b: torch.minimum(a, b, out=a)),
    (ReduceOp.MAX, lambda a, b: torch.maximum(a, b, out=a)),
    (ReduceOp.BAND, torch.Tensor.bitwise_and_),
    (ReduceOp.BOR, torch.Tensor.bitwise_or_),
    (ReduceOp.BXOR, torch.Tensor.bitwise_xor_),
]


def copy(target: Tensor, source: Tensor) -> None:
    """Write ``source``'s values into ``target``: no gradient, no new version."""
    if target is source:
        return
    if target.is_meta:
        values = shadow(source)
        set_shadow(target, values if values is None else values.reshape(target.shape))
        return
    source = source.data
    target.data.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def _barrier(parts: list[Part]) -> None:
    pass


def own_parts(parts: list[Part]) -> list[tuple[int, Part]]:
    """(rank of the group, part) of the ranks that run."""
    return [(n, part) for n, part in enumerate(parts) if part.group[n] == part.rank.index]


def _root(parts: list[Part]) -> int:
    return parts[0].group.index(parts[0].peer)


def _own_root(parts: list[Part]) -> list[tuple[int, Part]]:
    """The root, if it runs."""
    return [(position, part) for position, part in own_parts(parts) if position == _root(parts)]


def _combined(tensors: Sequence[Tensor], reduce_op: Any) -> Tensor:
    """The reduction in the order of the ranks."""
    values = [shadow(tensor) for tensor in tensors]
    if values[0] is None or any(value is None for value in values):
        return tensors[0]
    total = values[0].detach().clone()
    combine = next((call for op, call in COMBINE if reduce_op == op), None)
    if combine is None:
        raise ValueError(f"virtual ranks have no reduction {reduce_op}")
    for value in values[1:]:
        combine(total, value.detach())  # type: ignore[union-attr]
    return total.div_(len(tensors)) if reduce_op == ReduceOp.AVG else total


def _all_reduce(parts: list[Part]) -> None:
    for k in range(len(parts[0].gives)):
        total = _combined([part.gives[k] for part in parts], parts[0].reduce_op)
        for _, part in own_parts(parts):
            copy(part.gets[k], total)


def _reduce(parts: list[Part]) -> None:
    total = _combined([part.gives[0] for part in parts], parts[0].reduce_op)
    for _, root in _own_root(parts):
        copy(root.gets[0], total)


def _broadcast(parts: list[Part]) -> None:
    source = parts[_root(parts)]
    for _, part in own_parts(parts):
        for target, tensor in zip(part.gets, source.gives, strict=True):
            copy(target, tensor)


def _all_gather(parts: list[Part]) -> None:
    """``gets`` holds, for each tensor given, one output per rank."""
    count = len(parts[0].gives)
    for _, part in own_parts(parts):
        for k in range(count):
            for position, source in enumerate(parts):
                copy(part.gets[k * len(parts) + position], source.gives[k])


def _reduce_scatter(parts: list[Part]) -> None:
    """``gives`` holds, for each tensor got, one input per rank."""
    for k in range(len(parts[0].gets)):
        for position, part in own_parts(parts):
            at = k * len(parts) + position
            copy(part.gets[k], _combined([p.gives[at] for p in parts], part.reduce_op))


def _all_to_all(parts: list[Part]) -> None:
    moved = [
        (got, giver.gives[position].detach().clone())
        for position, part in own_parts(parts)
        for giver, got in zip(parts, part.gets, strict=True)
    ]
    for got, given in moved:
        copy(got, given)


def _gather(parts: list[Part]) -> None:
    for _, root in _own_root(parts):
        for target, part in zip(root.gets, parts, strict=True):
            copy(target, part.gives[0])


def _scatter(parts: list[Part]) -> None:
    gives = parts[_root(parts)].gives
    for position, part in own_parts(parts):
        copy(part.gets[0], gives[position])


MOVE: dict[str, Callable[[list[Part]], None]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
}
