"""One student's file: parts of the solution, wrong or written differently, the rest blank."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from distlab.course.catalogue import Exercise, Phase, root
from distlab.course.regions import END, START, functions_in
from distlab.course.templates import generate, sibling_import
from distlab.grading.wrong import Mutant


def file_of(
    phase: Phase,
    name: str,
    solved: Collection[str],
    mutants: Sequence[Mutant],
    alternative: Path | None = None,
) -> tuple[str, list[str]]:
    """The template with the exercises in ``solved`` filled in, and the mutants in it.

    A mutant that does not fit beside an earlier one is left out; with an ``alternative`` all of
    the file is solved.
    """
    first = next(e for e in phase.exercises if e.file == name)
    text = first.solution_path.read_text(encoding="utf-8")
    used = []
    for mutant in mutants:
        pairs = [(mutant.text, mutant.becomes), *mutant.more]
        exercise = next((e for e in phase.exercises if e.id == mutant.exercise), None)
        if exercise is not None and exercise.file == name:
            changed = text
            fits = all(changed.count(find) == 1 for find, _ in pairs)
            for find, becomes in pairs:
                changed = changed.replace(find, becomes)
            if fits and _parses(changed):
                text = changed
                used.append(mutant.id)
    if alternative is None:
        text = generate(text, phase.number, name, solved)
    else:
        every = _with(text, alternative, name).splitlines()
        text = "\n".join(sibling_import(line, phase.number) for line in every)
    lines = [line for line in text.splitlines() if not START.match(line) and not END.match(line)]
    return "\n".join(lines) + "\n", used


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def alternatives_for(
    exercises: Sequence[Exercise], rng: random.Random
) -> dict[tuple[int, str], Path]:
    """For each file one alternative from tests/alternatives, if there is one."""
    found = {}
    for exercise in exercises:
        there = sorted((root() / "tests" / "alternatives").glob(f"*/{exercise.file}.py"))
        mine = [p for p in there if f" {exercise.phase.number}." in p.read_text().splitlines()[0]]
        if mine:
            found[exercise.phase.number, exercise.file] = rng.choice(mine)
    for (phase, _), path in list(found.items()):
        for beside in re.findall(r"(?m)^from \.(\w+) import", path.read_text(encoding="utf-8")):
            if (path.parent / f"{beside}.py").is_file():  # they go together
                found[phase, beside] = path.parent / f"{beside}.py"
    return found


def _with(solution: str, alternative: Path, name: str) -> str:
    """The solution's file with the alternative's definitions in place of its own."""
    text = alternative.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    keeps: set[str] = set()  # of the solution: the alternative calls them
    bases: set[str] = set()  # its classes are derived from these, so they come first
    for node in reversed(tree.body):
        own = node is tree.body[0] and ast.get_docstring(tree) is not None
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        instead = [] if own or future else None
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("solutions."):
            beside = (node.module or "").rpartition(".")[2]
            renamed = [a for a in node.names if a.asname and a.asname != a.name]
            if beside == name:
                keeps |= {a.name for a in node.names}
                bases |= {a.name for a in renamed}
                instead = [f"{a.asname} = {a.name}" for a in renamed]
            else:
                names = ", ".join(ast.unparse(a) for a in node.names)
                instead = [f"from .{beside} import {names}"]
        if instead is not None:
            lines[node.lineno - 1 : node.end_lineno] = instead
    new = {n for n, _ in functions_in(tree)} | {
        n.name for n in tree.body if isinstance(n, ast.ClassDef)
    }
    return "\n".join(_replaced(solution, new - keeps, bases, lines)) + "\n"


def _replaced(solution: str, new: set[str], bases: set[str], by: list[str]) -> list[str]:
    """The solution's lines with ``by`` instead of the definitions in
    ``new``, behind its ``bases``."""
    lines = solution.splitlines()
    kept, cut = [0], set[int]()
    for node in ast.parse(solution).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in new | bases:
            begin = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            end = _end(lines, node.end_lineno or node.lineno)
            if node.name in bases:
                kept.append(end)
            else:
                cut |= {*range(begin, end)}
    position = max(kept) or min(cut, default=len(lines))
    above = [line for number, line in enumerate(lines[:position]) if number not in cut]
    below = [line for number, line in enumerate(lines[position:], position) if number not in cut]
    return [*above, "", "", *by, "", "", *below]


def _end(lines: list[str], number: int) -> int:
    """A region's end marker may stand a line behind its function."""
    return number + 1 if number < len(lines) and END.match(lines[number]) else number


def copied(files: dict[str, str]) -> dict[str, str]:
    """Another student's files, made to look like one's own: other comments
    and other blank lines."""
    return {
        name: re.sub(r"(?m)^(\s+)# .*$", r"\1# my own work", text).replace("\n\n\n", "\n\n")
        for name, text in files.items()
    }
