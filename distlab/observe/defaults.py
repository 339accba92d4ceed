"""Notice when a rank changes what torch makes tensors of: the default dtype or the default device.

Such a change reaches everything that the process makes afterwards, the caller's tensors as well.
Where it shows is far from where it is: as a mismatch of dtypes between ranks, or a wrong value.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from .lines import learner_line

Change = tuple[str, str, str]  # the value before, the value now, the line
SETTERS = ("set_default_dtype", "set_default_device", "set_default_tensor_type")


def notice_changes(
    tell: Callable[[str, Change], None], learner_files: Callable[[], Collection[str]]
) -> None:
    """From now on ``tell(what, change)`` of every change in this process; "dtype" or "device"."""
    first = default_dtype()
    for name in SETTERS:
        original = getattr(torch, name)

        def call(*args: Any, original: Callable[..., None] = original, **kwargs: Any) -> None:
            original(*args, **kwargs)
            line = learner_line(sys._getframe(1), learner_files())
            if original.__name__ == "set_default_device":
                device = (*args, *kwargs.values())[0]
                kind = "cpu" if device is None else torch.device(device).type
                tell("device", ("cpu", kind, line))
            else:
                tell("dtype", (first, default_dtype(), line))

        setattr(torch, name, functools.wraps(original)(call))


def default_dtype() -> str:
    """The default dtype's name, ``"float32"``."""
    return str(torch.get_default_dtype()).removeprefix("torch.")


def note(changes: dict[str, Change], what: str, change: Change) -> None:
    """Keep the latest change; none if the default is what it was."""
    before, now, _ = change
    if now == before:
        changes.pop(what, None)
    else:
        changes[what] = change
