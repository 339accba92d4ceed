"""The course's files that a program imports, also indirectly."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def closure(todo: Iterable[Path], home: Path) -> set[Path]:
    """The files in ``home`` that these import, with themselves."""
    found, left = set[Path](), list(todo)
    while left:
        path = left.pop()
        if path not in found and path.exists():
            found.add(path)
            left += imported(path, home)
    return found


def imported(path: Path, home: Path) -> list[Path]:
    """The paths that a file's imports would have in ``home``."""
    modules: list[Path] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            modules += [home.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if node.level else home
            module = base.joinpath(*(node.module or "").split("."))
            modules += [module, *(module / alias.name for alias in node.names)]
    return [p for m in modules for p in (m.with_suffix(".py"), m / "__init__.py")]
