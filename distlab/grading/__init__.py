"""Grade an implementation: the API that checks are written with, and the commands that run them."""

from __future__ import annotations

from ..failure import CheckFailed
from .checks import exercise, expect_close, expect_equal, fail, trace
from .run import grade, main

__all__ = [
    "CheckFailed",
    "exercise",
    "expect_close",
    "expect_equal",
    "fail",
    "grade",
    "main",
    "trace",
]
