"""Grade an implementation: the API for writing checks, and ``grade``, which runs them."""

from __future__ import annotations

from ..observe.failure import CheckFailed
from ..observe.log import expect_same_sequence
from .checks import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from .run import grade

__all__ = [
    "CheckFailed",
    "exercise",
    "expect_close",
    "expect_equal",
    "expect_few_waits",
    "expect_refusals",
    "expect_refused",
    "expect_same_sequence",
    "fail",
    "grade",
    "refusal",
    "trace",
]
