"""Hooks that don't keep their object alive, and that no two objects put on one parameter.

A parameter keeps its hooks, a hook that is a method keeps its object, and the object keeps the
parameter. Python's garbage collector can't look into autograd, so it never frees such a circle: the
gradients stay, and so does a process group with its threads [measured, torch 2.8 and 2.15].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Calls the bound ``method`` as long as its object lives, and then does nothing."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = known()
        if alive is not None:
            alive(*args)

    return call


def claim(parameters: Iterable[Tensor], owner: object) -> None:
    """Note that ``owner`` reduces the gradients of ``parameters`` as long as it lives.

    Raises ValueError if another living object does: both would divide, and both would send.
    """
    for p in parameters:
        other = _owners[p]() if p in _owners else None
        if other is not None and other is not owner:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} belongs to a living {type(other).__name__}"
            )
        _owners[p] = weakref.ref(owner)
