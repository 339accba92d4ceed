"""The verdict that an exception in a check stands for."""

from __future__ import annotations

import os

from ..observe.failure import CheckFailed
from ..observe.lines import source_line
from ..ranks.results import RankFailure
from ..sandbox import NotStarted
from .verdicts import CheckResult, NotRun


def verdict_of(error: BaseException | None) -> CheckResult:
    """The verdict, message, cause, rank and line that an exception in a check stands for."""
    if error is None:
        return CheckResult("", "pass")
    if isinstance(error, NotRun):
        return CheckResult(**vars(error.result))
    if isinstance(error, RankFailure):
        verdict = error.kind if error.kind in ("hang", "crash", "blank", "error") else "fail"
        printed = {r.rank: r.output for r in error.reports}
        return CheckResult(
            "", verdict, error.message, error.cause, error.rank, error.line, printed=printed
        )
    if isinstance(error, CheckFailed):
        line = source_line(error.line) if os.path.isabs(error.line) else error.line
        return CheckResult("", "fail", error.message, error.cause, error.rank, line)
    if isinstance(error, NotStarted):
        return CheckResult("", "error", str(error), "error")
    message = str(error) or "the check failed"
    if not isinstance(error, AssertionError):
        message = f"the check could not use what came back: {type(error).__name__}: {message}"
    return CheckResult("", "fail", message, "unusable")
