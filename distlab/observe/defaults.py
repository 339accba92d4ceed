"""Notice when a rank changes torch's default dtype or default device.

Such a change affects every tensor that the process makes afterwards, the caller's as well. It shows
far from its line: as a mismatch of dtypes between ranks, or as a wrong value.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from .lines import learner_line
from .notices import tell

SETTERS = ("set_default_dtype", "set_default_device", "set_default_tensor_type")


def notice_changes(learner_files: Callable[[], Collection[str]]) -> None:
    """From now on every change in this process is a notice: "dtype" or "device"."""
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
