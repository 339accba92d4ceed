"""Grade an implementation: the API that checks are written with, and the commands that run them."""

from __future__ import annotations

from ..failure import CheckFailed
from ..ledger import expect_same_sequence
from .checks import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from .run import grade, main

__all__ = [
    "CheckFailed",
    "exercise",
    "expect_close",
    "expect_equal",
    "expect_refusals",
    "expect_refused",
    "expect_same_sequence",
    "fail",
    "grade",
    "main",
    "refusal",
    "trace",
]
