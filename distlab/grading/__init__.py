"""Grade an implementation: the API for writing checks, and ``grade``, which runs them.

A name is imported when it is first asked for (start-up time): most need torch, and a command that
runs nothing does without. Their types are in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "distlab.observe.failure": ("CheckFailed",),
    "distlab.observe.log": ("expect_same_sequence",),
    "distlab.grading.checks": (
        "exercise",
        "expect_close",
        "expect_equal",
        "expect_few_waits",
        "expect_refusals",
        "expect_refused",
        "fail",
        "refusal",
        "trace",
    ),
    "distlab.grading.run": ("grade",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found
