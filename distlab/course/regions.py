"""The regions of a solution: lines between two markers. The learner will write them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

START = re.compile(r"^\s*# --- exercise (?P<id>\d+\.\d+): start\s*$")
END = re.compile(r"^\s*# --- exercise (?P<id>\d+\.\d+): end\s*$")


@dataclass(frozen=True)
class Region:
    """The lines (1-based, markers included) of one solution region."""

    exercise: str
    start: int
    end: int

    def within(self, node: ast.FunctionDef) -> bool:
        """Whether the region lies in the function's body; its end may be a line behind it."""
        return node.lineno < self.start and self.end <= (node.end_lineno or 0) + 1


def regions_of(text: str, name: str = "solution") -> list[Region]:
    """The regions of a solution file, in order; ValueError names the line of a broken marker."""
    found: list[Region] = []
    open_: tuple[str, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        start, end = START.match(line), END.match(line)
        if start:
            if open_:
                raise ValueError(f"{name}:{number}: region {open_[0]} has not ended")
            open_ = start["id"], number
        elif end:
            if not open_ or open_[0] != end["id"]:
                raise ValueError(f"{name}:{number}: end of {end['id']} without its start")
            found.append(Region(open_[0], open_[1], number))
            open_ = None
        elif "# --- exercise" in line:
            raise ValueError(f"{name}:{number}: not a region marker: {line.strip()}")
    if open_:
        raise ValueError(f"{name}: region {open_[0]} never ends")
    return found


def functions_in(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Functions and methods of a module, by their qualified names."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            found += [(f"{node.name}.{m.name}", m) for m in methods]
    return found
