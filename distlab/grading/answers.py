"""Code of solutions that stands in for code not written yet: read here, carried to a sandbox.

There are no solutions in a sandbox. The part that a run needs goes with it, as code, and without
the functions that the graded exercise asks for.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.util
import marshal
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..course.catalogue import (
    Exercise,
    check_files,
    functions_of,
    has_solutions,
    load_course,
    root,
)
from ..course.regions import functions_in

SOLUTIONS = "solutions"
_TAKEN = re.compile(r'\.solution\(\s*(\d)\s*,\s*"(\w+)"')  # from another exercise, for a check
_HELPERS = re.compile(r"^from (tests\.[\w.]+) import", re.M)
_carried: dict[str, bytes] | None = None  # code by the module's name, in a sandbox


@dataclass(frozen=True)
class Stand:
    """The part of a solution's ``module`` that one file of the learner's takes: all of it, or its
    functions and classes ``owners``."""

    module: str
    owners: tuple[str, ...]
    whole: bool


def stands(substitutes: Sequence[Exercise]) -> dict[str, Stand]:
    """The parts of the solution for these exercises, by file."""
    found = {}
    for file in dict.fromkeys(e.file for e in substitutes):
        replaced = [e for e in substitutes if e.file == file]
        phase = replaced[0].phase
        every = {e.id for e in phase.exercises if e.file == file}
        owners = dict.fromkeys(n.split(".")[0] for e in replaced for n in functions_of(e))
        whole = every == {e.id for e in replaced}
        found[file] = Stand(f"{SOLUTIONS}.{phase.folder}.{file}", tuple(owners), whole)
    return found


def absent() -> bool:
    """Whether there are no solutions at all, neither here nor carried here: in a hand-out."""
    return _carried is None and not has_solutions()


def path_of(module: str) -> Path:
    """The file of a solution's module."""
    return root().joinpath(*module.split(".")).with_suffix(".py")


def program(phase_folder: str, name: str) -> str:
    """The solutions' module ``name`` if it is a program without any exercise; else ""."""
    module = f"{SOLUTIONS}.{phase_folder}.{name}"
    if _carried is not None:
        return module if module in _carried else ""
    path = path_of(module)
    return module if path.is_file() and "# --- exercise" not in _text(path) else ""


def code_of(module: str) -> CodeType:
    """The code of a solution's module."""
    if _carried is not None:
        return _unpacked(_carried[module])
    return compiled(path_of(module))


def compiled(file: Path) -> CodeType:
    """The file's code, shared by the virtual ranks of a process."""
    return _compiled(file, file.stat().st_mtime_ns)


@functools.lru_cache
def _compiled(file: Path, changed: int) -> CodeType:
    """``changed``: the time of the file's last save."""
    return compile(file.read_bytes(), str(file), "exec")


@functools.lru_cache
def _unpacked(code: bytes) -> CodeType:
    found: CodeType = marshal.loads(code)
    return found


# -- outside --------------------------------------------------------------------------------------
@functools.lru_cache
def carry(stood: tuple[Stand, ...], graded: Exercise | None, phase_folder: str) -> dict[str, bytes]:
    """The code that a run of this exercise's checks may need of the solutions."""
    folder = root() / SOLUTIONS / phase_folder
    named = [program(phase_folder, path.stem) for path in sorted(folder.glob("*.py"))]
    programs = [*filter(None, named)]
    todo = [*programs, *(each.module for each in stood)]
    todo += [] if graded is None else _taken_by_checks(graded)
    found: dict[str, bytes] = {}
    while todo:
        module = todo.pop()
        if module in found or not path_of(module).is_file():
            continue
        tree = ast.parse(_text(path_of(module)))
        if graded is not None and module == f"{SOLUTIONS}.{graded.phase.folder}.{graded.file}":
            _leave_out(tree, functions_of(graded))
        found[module] = marshal.dumps(compile(tree, str(path_of(module)), "exec"))
        # a program's own package is the learner's
        todo += _imported(tree, module, relative=module not in programs)
    return found


def _taken_by_checks(exercise: Exercise) -> list[str]:
    """The modules that the exercise's checks and their helpers ask
    ``Implementation.solution`` for."""
    folders = {str(phase.number): phase.folder for phase in load_course().phases}
    todo, seen, found = check_files(exercise), set(), []
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        text = _text(path)
        found += [f"{SOLUTIONS}.{folders[n]}.{name}" for n, name in _TAKEN.findall(text)]
        todo += [path_of(name) for name in _HELPERS.findall(text)]
    return found


def _leave_out(tree: ast.Module, functions: Sequence[str]) -> None:
    for name, node in functions_in(tree):
        if name in functions:
            node.body = ast.parse("raise NotImplementedError").body


def _imported(tree: ast.Module, module: str, relative: bool) -> list[str]:
    """The solutions' modules that a module imports."""
    package = module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (relative or not node.level):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            found += [str(base), *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.startswith(f"{SOLUTIONS}.")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# -- inside ---------------------------------------------------------------------------------------
def carried(code: dict[str, bytes]) -> None:
    """Give this process these solutions only, from now on."""
    global _carried
    _carried = code
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``solutions.…`` from the code that was carried here."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != SOLUTIONS or _carried is None:
            return None
        if fullname.count(".") < 2:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        if fullname not in _carried:
            return None
        return importlib.util.spec_from_file_location(fullname, path_of(fullname), loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.count(".") == 2:
            exec(code_of(module.__name__), vars(module))
