"""Hooks that don't keep alive who is called.

A parameter keeps its hooks, a hook that is a method keeps its object, and the object keeps the
parameter. Python's garbage collector can't look into autograd, so it never frees such a circle: the
gradients stay, and so does a process group with its threads [measured, torch 2.8 and 2.15].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Calls the bound ``method`` as long as its object lives, and then does nothing."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = known()
        if alive is not None:
            alive(*args)

    return call
