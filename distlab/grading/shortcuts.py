"""Notice in a rank that learner code takes its answer from elsewhere: it fails, as a ``shortcut``.

"Elsewhere" means the solutions (imported, read, linked, copied by another program, taken from git),
or a feature of PyTorch that does the exercise's task. Calls count, not the text: names can be bent,
and a comment harms nobody. The innermost frame outside of libraries tells whose code calls. Checks,
the toolkit and solutions may call anything.

This finds learners who do not hide. Code that bends the interpreter itself needs a sandbox.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import linecache
import os
import site
import sys
import sysconfig
import tokenize
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch._ops

from ..course.catalogue import Exercise, Feature, features_for, functions_of, root
from ..observe import notices
from ..observe.failure import CheckFailed
from ..observe.lines import TORCH, source_line

LIBRARIES = ("<", sysconfig.get_paths()["stdlib"], *site.getsitepackages())
OURS = ("distlab", "tests", "given", "solutions", "benchmarks", "scripts")
ANSWERS = tuple(str(root() / name) + os.sep for name in ("solutions", ".git"))
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
MOVES = ("os.link", "os.symlink", "os.rename")
LOOKS_UP_LINES = (linecache.__file__, tokenize.__file__)
_import, _import_module = builtins.__import__, importlib.import_module


class Shortcut(CheckFailed):
    """Raised in learner code. The parent is told as well, because learner code may catch it."""

    kind = "exception"


@dataclass(frozen=True)
class Guard:
    """The code that one graded exercise may not take. Made in the grader, installed in its ranks.

    ``own``: the learner's files of the phase. ``asked``: the functions that the exercise asks for.
    ``features``: PyTorch's own in their stead.
    """

    module: str
    own: tuple[str, ...]
    asked: tuple[str, ...]
    features: tuple[Feature, ...]

    def install(self) -> None:
        """Begin to notice shortcuts in this process, once."""
        global _guard
        if _guard is not None:
            return
        _guard = self
        linecache.clearcache()  # the grader may have read solutions
        builtins.__import__ = _guarded_import
        importlib.import_module = _guarded_import_module
        sys.addaudithook(_audit)
        hide_answers()
        _wrap_features()
        _wrap_operators()


_guard: Guard | None = None
_wrapped: set[str] = set()


def guard_of(exercise: Exercise, own: tuple[str, ...]) -> Guard:
    """The guard of an exercise whose phase has the learner's files ``own``."""
    module = f"solutions.{exercise.phase.folder}.{exercise.file}"
    return Guard(module, own, tuple(functions_of(exercise)), features_for(exercise))


def hide_answers() -> None:
    """Block the solution's functions for the exercise, however learner code finds them."""
    if _guard is None or _guard.module not in sys.modules:
        return
    module = sys.modules[_guard.module]
    for name in _guard.asked:
        owner, _, method = name.rpartition(".")
        setattr(getattr(module, owner) if owner else module, method, _not_to_be_had(name))


def _culprit(frame: FrameType | None, *, of_torch: bool = False) -> str:
    """The learner's line behind ``frame``; empty if the learner is not behind it.

    ``of_torch``: ``frame`` calls PyTorch's own code, which PyTorch may also call by itself.
    """
    assert _guard is not None
    while frame is not None:
        name = frame.f_code.co_filename
        if name in _guard.own:
            return f"{name}:{frame.f_lineno}"
        if of_torch and name.startswith(TORCH):
            return ""
        if not name.startswith((TORCH, *LIBRARIES)):
            ours = name.startswith(_trusted())
            return "" if ours else f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _trusted() -> tuple[str, ...]:
    return tuple(str(root() / name) + os.sep for name in OURS)


def _stop(what: str, line: str) -> None:
    notices.tell("shortcut", ("", what, line))
    raise Shortcut(what, cause="shortcut", line=source_line(line))


def _not_to_be_had(name: str) -> Callable[..., None]:
    def taken(*_: object, **__: object) -> None:
        line = _culprit(sys._getframe(1))
        _stop(f"calls the solution's {name}: write it yourself", line)

    return taken


# -- the solutions --------------------------------------------------------------------------------
def _guarded_import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    if level == 0 and name.partition(".")[0] == "solutions":
        _refuse_import(name, sys._getframe(1))
    before = len(sys.modules)
    found = _import(name, globals, locals, fromlist, level)
    if len(sys.modules) != before:  # PyTorch imports inside of functions, at every call
        _wrap_features()
    return found


def _guarded_import_module(name: str, package: str | None = None) -> ModuleType:
    if name.partition(".")[0] == "solutions":
        _refuse_import(name, sys._getframe(1))
    found = _import_module(name, package)
    _wrap_features()
    return found


def _refuse_import(name: str, frame: FrameType) -> None:
    line = _culprit(frame)
    if line:
        _stop(f"imports {name}: write it yourself", line)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Python's own audit events: calls that touch files and start programs."""
    if event == "open":
        reached = _is_answer(args[0])
    elif event in PROGRAMS:
        words = _words(args)
        reached = "solutions" in words or "git" in words.replace(os.sep, " ").split()
    elif event in MOVES:
        reached = _is_answer(args[0])
    else:
        return
    if not reached or _guard is None:
        return
    line = _culprit(sys._getframe(1))
    if line and event == "open" and _shows_a_stack(sys._getframe(1)):
        raise PermissionError("no lines of the solutions")  # the stack is shown without them
    if line and event in PROGRAMS:
        _stop("starts a program that reaches for the solutions: write it yourself", line)
    elif line:
        _stop(f"reads {Path(os.fsdecode(args[0])).name} of the solutions: write it yourself", line)


def _shows_a_stack(frame: FrameType | None) -> bool:
    """Whether ``traceback`` looks for the lines of an exception that went through a solution."""
    while frame is not None and frame.f_code.co_filename in LOOKS_UP_LINES:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == traceback.__file__


def _is_answer(path: object) -> bool:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    given = os.path.abspath(os.fsdecode(path))
    assert _guard is not None
    return given not in _guard.own and os.path.realpath(given).startswith(ANSWERS)


def _words(value: object) -> str:
    if isinstance(value, (str, bytes, os.PathLike)):
        return os.fsdecode(value)
    if isinstance(value, (list, tuple)):
        return " ".join(_words(item) for item in value)
    return ""


# -- PyTorch's features ---------------------------------------------------------------------------
def _wrap_features() -> None:
    """Wrap the features of modules that are loaded by now, and the others as
    soon as they are loaded."""
    assert _guard is not None
    for feature in _guard.features:
        for call in feature.calls:
            holder, _, attribute = call.rpartition(".")
            found = None if call in _wrapped else _loaded(holder)
            if hasattr(found, attribute):  # else it is still being imported, or lies elsewhere
                _wrapped.add(call)
                _wrap(found, attribute, feature.name)


def _loaded(name: str) -> Any:
    """The module, or the class in a module, with this name; None if it is not loaded."""
    if name in sys.modules:
        return sys.modules[name]
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _wrap(holder: Any, attribute: str, name: str) -> None:
    original = getattr(holder, attribute)
    if isinstance(original, type):
        holder, attribute, original = original, "__init__", original.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        line = _culprit(sys._getframe(1), of_torch=True)
        if line:
            _stop(f"uses PyTorch's {name}: this exercise is about writing it", line)
        return original(*args, **kwargs)

    setattr(holder, attribute, noticed)


def _wrap_operators() -> None:
    """Forbid ``torch.ops.c10d.allreduce_(…)`` and the like: ``torch.distributed``
    itself is made of these."""
    original = torch._ops.OpOverloadPacket.__call__

    def noticed(packet: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = packet._qualified_op_name
        if name.startswith(("c10d::", "_c10d_functional::")):
            line = _culprit(sys._getframe(1), of_torch=True)
            if line:
                _stop(f"calls the operator {name}: call torch.distributed", line)
        return original(packet, *args, **kwargs)

    torch._ops.OpOverloadPacket.__call__ = noticed
