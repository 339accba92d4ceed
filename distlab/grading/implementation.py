"""The implementation under test: found by name or path, imported inside ranks only."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import linecache
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..course.catalogue import Exercise, Phase, load_course
from ..host import gpus
from ..observe.failure import CheckFailed
from .answers import Stand, absent, carried, carry, code_of, compiled, path_of, program, stands
from .shortcuts import Guard, guard_of, hide_answers
from .sources import Source

PACKAGE = "implementation"
_grader = 0


def protect_this_process() -> None:
    """This process is the grader's own: learner code never runs in it, and it sees no GPU.

    The expected values of checks are computed here, and ranks are forked afterwards.
    """
    global _grader
    _grader = os.getpid()
    gpus.hide()


class Implementation:
    """The module under test; its attributes are those of the learner's module.

    Only usable inside a rank: the grader's own process never runs learner code. Functions of the
    exercises in ``substitutes`` are taken from the solution instead. While an exercise is
    ``graded`` and ``guarded``, its answer may not be taken from elsewhere.
    """

    def __init__(
        self,
        source: Source,
        module: str,
        substitutes: Sequence[Exercise] = (),
        graded: Exercise | None = None,
        guarded: bool = True,
    ) -> None:
        self._source = source
        self._module = module
        self._stands = stands(substitutes)
        self._graded = graded
        self._guard: Guard | None = None
        if graded is not None and guarded:
            own = {str(source.path(each.file)) for each in graded.phase.exercises}
            self._guard = guard_of(graded, tuple(own))
            linecache.clearcache()  # so that it is short work in each rank, which copies no pages

    def __getstate__(self) -> dict[str, Any]:
        """For a sandbox: with the parts of the solutions that ranks may need,
        without the course's map."""
        code = carry(tuple(self._stands.values()), self._graded, self._source.folder.name)
        return {"own": vars(self) | {"_graded": None}, "code": code}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["own"])
        carried(state["code"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.module(self._module), name)

    def module(self, name: str) -> ModuleType:
        """The implementation's module ``name``, for example ``data_loader``."""
        assert os.getpid() != _grader, "learner code runs in ranks only; use impl inside a body"
        if not any(isinstance(f, _Finder) for f in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self._source, self._stands))
            if self._guard is not None:
                self._guard.install()
        rank = getattr(threading.current_thread(), "virtual_rank", "")  # modules of its own
        package = PACKAGE + rank
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = []
        return importlib.import_module(f"{package}.{self._source.prefix}{name}")

    def solution(self, phase: int, name: str) -> ModuleType:
        """The solution's module ``name``, whatever the learner's module does. A check uses
        it if it takes a part from another phase, which is not graded now, or if it measures
        the course's own code."""
        return solution(load_course().phase(phase), name)


class NotHandedOut(CheckFailed):
    """Raised in a rank by a check that needs a part of the solutions, in a hand-out."""

    kind = "needs"

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="needs")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``implementation.X`` and ``implementation.template_X`` from the learner's X.

    Both are one module. Some program of the solutions has no exercise in it: it puts the phase's
    parts together. It is imported with the learner's parts.
    """

    def __init__(self, source: Source, stood: dict[str, Stand]) -> None:
        self.source = source
        self.stood = stood

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, stem = fullname.rpartition(".")
        if not package.startswith(PACKAGE) or "." in package:
            return None
        name = stem.removeprefix("template_")
        taken = self._program(name)
        file = path_of(taken) if taken else self.source.path(name)
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def _program(self, name: str) -> str:
        """The program of the solutions that stands for a module that the learner lacks."""
        if self.source.path(name).is_file():
            return ""
        if absent() and name not in {e.file for e in load_course().exercises}:
            raise NotHandedOut(f"the course's own {name}: it isn't handed out")
        return program(self.source.folder.name, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        package, _, stem = spec.name.rpartition(".")
        prefix = self.source.prefix
        if stem.startswith(prefix) or not self.source.path(stem).name.startswith(prefix):
            return None
        return importlib.import_module(f"{package}.{prefix}{stem}")

    def exec_module(self, module: ModuleType) -> None:
        if hasattr(module, "__imported__"):
            return  # under its other name
        vars(module)["__imported__"] = True
        name = module.__name__.rpartition(".")[2].removeprefix("template_")
        file, taken, stand = self.source.path(name), self._program(name), self.stood.get(name)
        if stand is not None and (stand.whole or not _importable(file)):
            taken, stand = stand.module, None  # on the learner's other files
        code = code_of(taken) if taken else compiled(file)
        exec(code, vars(module))
        if stand is not None:
            for owner in stand.owners:
                setattr(module, owner, getattr(imported(stand.module), owner))


def _importable(file: Path) -> bool:
    """Whether a file is Python, as far as ``sources.in_the_file`` asks it of the graded one: that
    one must not be replaced here."""
    try:
        ast.parse(file.read_bytes())
    except (SyntaxError, OSError, ValueError, RecursionError, MemoryError):
        return False
    return True


def solution(phase: Phase, module: str) -> ModuleType:
    """The solution's module."""
    if absent():
        part = f"{module} of phase {phase.number}"
        raise NotHandedOut(f"the course's own {part}: it isn't handed out")
    return imported(f"solutions.{phase.folder}.{module}")


def imported(module: str) -> ModuleType:
    """A solution's module, which all ranks of a process share: the only import of solutions."""
    found = importlib.import_module(module)
    hide_answers()
    return found
