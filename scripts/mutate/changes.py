"""All changes of one exercise's regions, each with a name that stays when other lines move."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distlab.course.catalogue import Exercise
from distlab.course.regions import functions_in, regions_of

from .operators import ON_NODES


@dataclass(frozen=True)
class Change:
    """One wrong program: ``was`` became ``becomes`` in ``line`` of ``function``.

    ``number`` counts those that read the same; ``text`` is the whole file.
    """

    operator: str
    function: str
    line: str
    was: str
    becomes: str
    number: int
    text: str

    @property
    def name(self) -> str:
        """The name of the change in the table."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.function}: {self.was} -> {self.becomes} in {self.line}{again}"


def changes(exercise: Exercise, text: str) -> list[Change]:
    """Every change that gives another valid program, in the order of the file."""
    tree = ast.parse(text)
    spans = [(r.start, r.end) for r in regions_of(text) if r.exercise == exercise.id]
    functions, lines = functions_in(tree), text.splitlines()
    silent = {id(node) for node in _without_effect(tree)}
    seen = {ast.dump(ast.Module([whole], [])) for whole in tree.body}
    names: Counter[tuple[str, str, str, str]] = Counter()
    found: list[Change] = []
    for node, operator in ((n, o) for n in ast.walk(tree) if id(n) not in silent for o in ON_NODES):
        for target, becomes in operator(node):
            first, last = getattr(target, "lineno", 0), getattr(target, "end_lineno", 0)
            if not any(start < first and last < stop for start, stop in spans):
                continue
            changed = _replaced(text, target, becomes)
            (whole,) = (n for n in tree.body if n.lineno <= first and last <= (n.end_lineno or 0))
            begin, end = _span(text, whole)
            try:  # the function or class is enough, and parsed in a tenth of the file's time
                dump = ast.dump(ast.parse(changed[begin : end + len(changed) - len(text)]))
            except SyntaxError:
                continue
            if dump in seen:
                continue
            seen.add(dump)
            was, now = _short(text, target), " ".join(becomes.split())
            function, line = _function(functions, first), lines[first - 1].strip()
            reads = function, line, was, now
            names[reads] += 1
            found.append(Change(operator.__name__, *reads, names[reads], changed))
    return found


def _without_effect(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that no check may ask for: the words of a message, and
    ``strict`` of a zip that fits."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                yield from ast.walk(argument)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            yield from ast.walk(node.value)


def fingerprint(exercise: Exercise, text: str) -> str:
    """A hash of the changes: another one means that the table is out of date."""
    every = "\n".join(change.name for change in changes(exercise, text))
    return hashlib.sha256(every.encode()).hexdigest()[:12]


def solution_text(exercise: Exercise) -> str:
    """The text of the exercise's solution."""
    return Path(exercise.solution_path).read_text(encoding="utf-8")


def _function(functions: list[tuple[str, ast.FunctionDef]], line: int) -> str:
    inside = [(node.lineno, name) for name, node in functions if node.lineno <= line]
    return max(inside, default=(0, "module"))[1]


def _offset(text: str, line: int, column: int) -> int:
    lines = text.splitlines(keepends=True)
    before = lines[line - 1].encode()[:column].decode()
    return sum(map(len, lines[: line - 1])) + len(before)


def _span(text: str, node: ast.AST) -> tuple[int, int]:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin = _offset(text, node.lineno, node.col_offset)
    return begin, _offset(text, node.end_lineno, node.end_col_offset)


def _replaced(text: str, node: ast.AST, becomes: str) -> str:
    begin, end = _span(text, node)
    return text[:begin] + becomes + text[end:]


def _short(text: str, node: ast.AST) -> str:
    begin, end = _span(text, node)
    return " ".join(text[begin:end].split())
