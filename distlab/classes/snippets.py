"""A few lines of a learner's code around the line that the grader named, without their author.

Comments and docstrings are left out, texts in quotes are hidden, and names that the course does not
use are replaced.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import token
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..course.catalogue import Course, Exercise, functions_of
from ..course.regions import functions_in
from .anonymous import HIDDEN, Mask
from .misconceptions import Misconception, Witness

MOST_BYTES = 400_000
MOST_LINES = 24
BEFORE = 14  # of these, lines before the line named, where the function is longer
NAMED = re.compile(r"^(?P<file>[^:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True)
class Line:
    """A line of code, or a mark where lines are left out. ``named``: the grader pointed at it."""

    text: str
    named: bool = False


def snippet(
    found: Misconception, folders: Mapping[str, Path], course: Course, mask: Mask
) -> list[Line]:
    """The shortest snippet with its named line, among the students concerned;
    empty if there is none."""
    exercise = next((e for e in course.exercises if e.id == found.exercise), None)
    if exercise is None:
        return []
    each = [
        _of_witness(w, folders[w.student.id], exercise, mask)
        for w in found.witnesses
        if w.student.id in folders
    ]
    shown = [lines for lines in each if lines]
    return min(shown, key=_order, default=[])


def _order(lines: list[Line]) -> tuple[bool, int, list[str]]:
    return not any(line.named for line in lines), len(lines), [line.text for line in lines]


def _of_witness(witness: Witness, folder: Path, exercise: Exercise, mask: Mask) -> list[Line]:
    named = NAMED.match(witness.failed.line)
    path = _file(folder, named["file"] if named else exercise.template_path.name, exercise)
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")  # newlines become "\n"
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    number = int(named["line"]) if named else 0
    function = _function(tree, number, exercise)
    if function is None:
        return []
    lines = _without_names(text, tree, function, mask)
    return _window(lines, number)


def _file(folder: Path, name: str, exercise: Exercise) -> Path | None:
    """The learner's file; the line may call it by the template's name or by the solution's."""
    home = folder / exercise.phase.folder
    for candidate in (home / Path(name).name, home / exercise.template_path.name):
        if candidate.is_file() and not candidate.is_symlink():
            return candidate if candidate.stat().st_size <= MOST_BYTES else None
    return None


def _function(tree: ast.Module, number: int, exercise: Exercise) -> ast.FunctionDef | None:
    """The outermost function around the line. Without a line it is the exercise's
    function, if it has only one."""
    functions = functions_in(tree)
    if number:
        around = [n for _, n in functions if n.lineno <= number <= (n.end_lineno or 0)]
        return around[0] if around else None
    names = functions_of(exercise)
    mine = [node for name, node in functions if name in names]
    return mine[0] if len(mine) == 1 else None


def _without_names(
    text: str, tree: ast.Module, function: ast.FunctionDef, mask: Mask
) -> list[tuple[int, str]]:
    """The function's anonymous lines by their numbers, without empty lines and docstrings."""
    lines = text.split("\n")  # not splitlines(): Python's lines end here only
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    last = function.end_lineno or function.lineno
    inside = [t for t in _tokens(text) if function.lineno <= t.start[0] and t.end[0] <= last]
    names = dict.fromkeys(
        t.string for t in inside if t.type == token.NAME and not mask.keeps(t.string)
    )
    new_names = {name: f"name_{number}" for number, name in enumerate(names, 1)}
    for each in reversed(inside):  # from the end, so that positions before it stay
        _replace(lines, each, new_names, mask)
    return [
        (number, lines[number - 1].rstrip())
        for number in range(function.lineno, last + 1)
        if number not in skipped and lines[number - 1].strip()
    ]


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):  # ast has read it before
        return []


def _replace(
    lines: list[str], each: tokenize.TokenInfo, new_names: dict[str, str], mask: Mask
) -> None:
    """Take the token's text out of the lines if it could tell who wrote it."""
    middle = getattr(token, "FSTRING_MIDDLE", -1)  # since Python 3.12
    if each.type == token.COMMENT:
        new = ""
    elif each.type == token.STRING:
        new = f'"{HIDDEN}"'
    elif each.type == middle:
        new = HIDDEN
    elif each.type == token.NAME and each.string in new_names:
        new = new_names[each.string]
    elif each.type == token.NUMBER and not mask.keeps_number(each.string):
        new = HIDDEN
    else:
        return
    (first, start), (last, end) = each.start, each.end
    lines[first - 1] = lines[first - 1][:start] + new + lines[last - 1][end:]
    for number in range(first, last):
        lines[number] = ""


def _window(lines: list[tuple[int, str]], number: int) -> list[Line]:
    """At most MOST_LINES of the lines, with the named line among them."""
    index = next((i for i, (n, _) in enumerate(lines) if n == number), 0)
    first = max(0, min(index - BEFORE, len(lines) - MOST_LINES))
    chosen = lines[first : first + MOST_LINES]
    dedented = textwrap.dedent("\n".join(text for _, text in chosen)).split("\n")
    shown = [Line(text, n == number) for (n, _), text in zip(chosen, dedented, strict=True)]
    before = [Line(HIDDEN)] if first > 0 else []
    after = [Line(HIDDEN)] if first + MOST_LINES < len(lines) else []
    return [*before, *shown, *after]
