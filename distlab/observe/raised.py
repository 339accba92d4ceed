"""A rank's report of an exception: plain data, whatever the learner's exception class does."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

from .failure import CheckFailed
from .lines import TOOLKIT, TORCH

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs from rank to rank
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LONGEST = 10_000  # characters of a message that are kept


def describe(error: BaseException, learner_files: tuple[str, ...]) -> dict[str, Any]:
    """The facts about an exception that the parent needs.

    ``__str__`` and ``__repr__`` are the learner's code. If they raise or return no string, the
    message says so. The type and the line are still those of the exception itself.
    """
    frames = traceback.extract_tb(BaseException.__dict__["__traceback__"].__get__(error))
    own = [f for f in frames if f.filename in learner_files]
    outside = [f for f in frames if not f.filename.startswith((TOOLKIT, TORCH, "<"))]
    shown = (own or outside or frames)[-1:]
    line = f"{shown[0].filename}:{shown[0].lineno}" if shown else ""
    if isinstance(error, SyntaxError) and error.filename in learner_files:
        line = f"{error.filename}:{error.lineno}"
    ours = error if isinstance(error, CheckFailed) else None
    return {
        "type": _name(type(error)),
        "message": _text(error, str, "__str__"),
        "line": line,
        "in_learner_code": bool(own),
        "cause": ours.cause if ours else "",
        "own_line": ours.line if ours else "",
        "is_import": isinstance(error, (ImportError, SyntaxError)),
        "kind": getattr(ours, "kind", ""),
        "code": _exit_code(error) if isinstance(error, SystemExit) else None,
    }


def _text(value: object, convert: Callable[[Any], str], method: str) -> str:
    """``str(value)`` or ``repr(value)``; if the learner's method fails, a text that says how."""
    try:
        return printable(_ADDRESS.sub("", str.__str__(convert(value))[:LONGEST]))
    except BaseException as problem:
        return f"(no message: {method} of {_name(type(value))} raised {_name(type(problem))})"


def printable(text: str) -> str:
    """The text with control characters as escapes: a terminal must not obey a learner's output."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _exit_code(error: SystemExit) -> int | str | None:
    """The argument of ``sys.exit``, as it is written in the program."""
    code = error.code
    if code is None or type(code) is int:
        return code
    return _text(code, repr, "__repr__")


def _name(cls: type) -> str:
    return str(type.__dict__["__name__"].__get__(cls))
