"""The implementation under test: found by name or path, imported inside ranks only."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..course.catalogue import (
    Exercise,
    Phase,
    functions_of,
    has_solutions,
    load_course,
    need_solutions,
    root,
)
from ..host import gpus
from ..observe.failure import CheckFailed
from .shortcuts import Guard, guard_of, hide_answers

PACKAGE = "implementation"
_grader = 0


def protect_this_process() -> None:
    """This process is the grader's own: learner code never runs in it, and it sees no GPU.

    What checks expect is computed here, and ranks are forked afterwards.
    """
    global _grader
    _grader = os.getpid()
    gpus.hide()


@dataclass(frozen=True)
class Source:
    """Where the files of one implementation of a phase are."""

    name: str
    folder: Path
    prefix: str = ""

    def path(self, module: str) -> Path:
        """The file of ``module``, whether it exists or not."""
        named = [self.folder / f"{prefix}{module}.py" for prefix in (self.prefix, "", "template_")]
        return next((p for p in named if p.is_file()), named[0])

    def files(self) -> tuple[str, ...]:
        """All Python files of the implementation: frames in them are the learner's."""
        return tuple(str(p) for p in sorted(self.folder.glob("*.py")))


def find_source(impl: str, phase: Phase) -> Source:
    """The implementation called ``solutions`` or ``templates``, or that in a folder.

    Raises ValueError with what to do if the folder holds none.
    """
    if impl == "solutions":
        need_solutions("--impl solutions")
        return Source(impl, root() / "solutions" / phase.folder)
    if impl == "templates":
        return Source(impl, root() / phase.folder, "template_")
    folder = Path(impl).resolve()
    if folder.is_dir() and (folder / phase.folder).is_dir():
        folder = folder / phase.folder
    if not folder.is_dir() or not any(folder.glob("*.py")):
        raise ValueError(
            f"--impl {impl}: expected 'solutions', 'templates' or a folder with "
            f"{phase.folder}'s files"
        )
    return Source(impl, folder)


def blank_lines(path: Path, exercise_id: str) -> list[int]:
    """Lines on which the exercise's ``raise NotImplementedError`` still stands.

    Raises SyntaxError if the file is not Python, OSError if it can't be read.
    """
    text = path.read_bytes()
    if b"NotImplementedError" not in text:  # to look at every node takes ten times as long
        compile(text, str(path), "exec")
        return []
    tree = ast.parse(text, str(path))
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") == "NotImplementedError"
        and any(
            isinstance(a, ast.Constant) and a.value == f"exercise {exercise_id}"
            for a in node.exc.args
        )
    ]


class Implementation:
    """The module under test; its attributes are those of the learner's module.

    Only usable inside a rank: the grader's own process never runs learner code. Functions of the
    exercises in ``substitutes`` are taken from the solution instead. While an exercise is
    ``graded``, its answer may not be taken from elsewhere.
    """

    def __init__(
        self,
        source: Source,
        module: str,
        substitutes: Sequence[Exercise] = (),
        graded: Exercise | None = None,
    ) -> None:
        self._source = source
        self._module = module
        self._substitutes = tuple(substitutes)
        self._guard: Guard | None = None
        if graded is not None:
            own = {str(source.path(each.file)) for each in graded.phase.exercises}
            self._guard = guard_of(graded, tuple(own))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.module(self._module), name)

    def module(self, name: str) -> ModuleType:
        """The implementation's module ``name``, for example ``data_loader``."""
        assert os.getpid() != _grader, "learner code runs in ranks only; use impl inside a body"
        if not any(isinstance(f, _Finder) for f in sys.meta_path):
            sys.meta_path.insert(0, _Finder(self._source, self._substitutes))
            if self._guard is not None:
                self._guard.install()
        rank = getattr(threading.current_thread(), "virtual_rank", "")  # modules of its own
        package = PACKAGE + rank
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = []
        return importlib.import_module(f"{package}.{self._source.prefix}{name}")

    def solution(self, phase: int, name: str) -> ModuleType:
        """The solution's module ``name``, whatever the learner's does: for a check that takes a
        part from another phase, which is not graded now, or that measures the course's own."""
        return solution(load_course().phase(phase), name)


class NotHandedOut(CheckFailed):
    """Raised in a rank by a check that needs a part of the solutions, in a hand-out."""

    kind = "needs"

    def __init__(self, message: str) -> None:
        super().__init__(message, cause="needs")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``implementation.X`` and ``implementation.template_X`` from the learner's X.

    Both are one module. A program of the solutions that has no exercise in it (it puts the phase's
    parts together) is imported with the learner's parts.
    """

    def __init__(self, source: Source, substitutes: tuple[Exercise, ...]) -> None:
        self.source = source
        self.substitutes = substitutes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, stem = fullname.rpartition(".")
        if not package.startswith(PACKAGE) or "." in package:
            return None
        file = self._file(stem.removeprefix("template_"))
        return importlib.util.spec_from_file_location(fullname, file, loader=self)

    def _file(self, name: str) -> Path:
        file = self.source.path(name)
        if not file.is_file():
            if not has_solutions() and name not in {e.file for e in load_course().exercises}:
                raise NotHandedOut(f"the course's own {name}: it isn't handed out")
            program = root() / "solutions" / self.source.folder.name / f"{name}.py"
            if program.is_file() and "# --- exercise" not in program.read_text(encoding="utf-8"):
                return program
        return file

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
        file = self._file(name)
        replaced = [e for e in self.substitutes if e.file == name]
        if replaced and (_whole(replaced) or not _importable(file)):
            file, replaced = replaced[0].solution_path, []  # on the learner's other files
        exec(_compiled(file, file.stat().st_mtime_ns), vars(module))
        for exercise in replaced:
            for function in functions_of(exercise):
                owner = function.split(".")[0]
                setattr(module, owner, getattr(solution(exercise.phase, name), owner))


@functools.lru_cache
def _compiled(file: Path, changed: int) -> CodeType:
    """The file's code, shared by the virtual ranks of a process; ``changed``: its last save."""
    return compile(file.read_bytes(), str(file), "exec")


def _whole(replaced: list[Exercise]) -> bool:
    """Whether every exercise of the file is taken from the solution."""
    every = {e.id for e in replaced[0].phase.exercises if e.file == replaced[0].file}
    return every == {e.id for e in replaced}


def _importable(file: Path) -> bool:
    try:
        ast.parse(file.read_bytes())
    except (SyntaxError, OSError, ValueError, RecursionError, MemoryError):
        return False
    return True


def solution(phase: Phase, module: str) -> ModuleType:
    """The solution's module, which all ranks of a process share: the only import of solutions."""
    if not has_solutions():
        part = f"{module} of phase {phase.number}"
        raise NotHandedOut(f"the course's own {part}: it isn't handed out")
    found = importlib.import_module(f"solutions.{phase.folder}.{module}")
    hide_answers()
    return found
