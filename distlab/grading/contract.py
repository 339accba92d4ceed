"""The contract of an exercise: the promises of its docstrings, and the checks that assert them.

``tests/phase1/contract/trainer.toml`` lists every sentence of the docstrings of ``trainer.py``,
named by its beginning, with the keys of its promises. A check names the keys that it asserts:
``@exercise("1.4", "virtual", asserts="mean dtype")``. Every exercise is also compared with the same
``AXES``. On each axis programs that look right go wrong. A check asserts an axis, or the file says
why the axis does not apply.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..course import templates
from ..course.catalogue import Exercise, check_files, functions_of, root
from ..host.toml import tomllib

AXES = {
    "group": "a subgroup, no prefix and not in order of rank, while other ranks do other things",
    "dtype": "16-bit, 64-bit and mixed dtypes; integers above 2^53; limits in bytes",
    "layout": "strided, transposed, empty, 0-d; views of one storage; what storage and leaf stay",
    "parameters": "frozen, unused, tied, in several dtypes; non-persistent buffers",
    "life": "called twice, after an exception, left early, resumed, nested, used for two models",
    "alone": "one rank only: no samples, a zero or missing gradient, an exception, a missing file",
    "resources": "what is alive during the call and afterwards: memory, handles, threads, files; "
    "global random state",
    "refusals": "every documented error, on every rank, before anything is sent",
    "cost": "bytes, messages, partners, order, what is in flight, real overlap",
    "randomness": "independence and unbiasedness over many draws; equal on ranks where it must be",
    "output": "what is printed, plotted, written and reported",
}
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`(Σ])|\n\s*\n|\n(?=\s*- )")


@dataclass(frozen=True)
class Promise:
    """One sentence of a docstring and the keys of its promises (none: it only explains)."""

    function: str
    sentence: str
    keys: tuple[str, ...]


@dataclass
class Contract:
    """All promises of an exercise, the checks that assert them, and axes that do not apply."""

    exercise: Exercise
    promises: list[Promise] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    asserted: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def contract(exercise: Exercise) -> Contract:
    """Read the exercise's contract; ``problems`` names its missing parts."""
    entry = _entries(_file(exercise), _changed(exercise)).get(exercise.id, {})
    found = Contract(exercise, excluded=dict(entry.get("excluded", {})))
    keys_of = {name: dict(lines) for name, lines in entry.get("promises", {}).items()}
    for name, sentence in sentences(exercise):
        begins = [b for b in keys_of.get(name, {}) if sentence.startswith(b)]
        if not begins:
            found.problems.append(f"{name}: no entry for the sentence: {sentence}")
            continue
        keys = tuple(keys_of[name].pop(begins[0]).split())
        found.promises.append(Promise(name, sentence, keys))
    for name, left in keys_of.items():
        found.problems += [f"{name}: its docstring has no sentence: {begin}" for begin in left]
    found.asserted = _asserted(exercise, found.problems)
    _compare(found)
    return found


def _compare(found: Contract) -> None:
    promised = {key for promise in found.promises for key in promise.keys}
    for key in sorted(promised - set(found.asserted)):
        found.problems.append(f"no check asserts {key!r}")
    for key in sorted(set(found.asserted) - promised - set(AXES)):
        checks = ", ".join(found.asserted[key])
        found.problems.append(f"{checks} asserts {key!r}, which no sentence promises")
    for axis in AXES:
        reason = found.excluded.get(axis, "")
        if axis not in found.asserted and len(reason.split()) < 4:
            found.problems.append(f"axis {axis}: neither a check nor a reason")
        if axis in found.asserted and reason:
            found.problems.append(f"axis {axis}: a check and a reason why there is none")
    for axis in sorted(set(found.excluded) - set(AXES)):
        found.problems.append(f"there is no axis {axis}")


def sentences(exercise: Exercise) -> list[tuple[str, str]]:
    """(function, sentence) of the docstrings of the exercise's functions and of their classes."""
    tree = ast.parse(templates.documented(exercise))
    wanted = set(functions_of(exercise))
    return [
        (name, " ".join(sentence.split()))
        for name, node in _documented(tree, exercise, wanted)
        for sentence in SENTENCE.split(ast.get_docstring(node) or "")
        if sentence.strip()
    ]


Documented = ast.FunctionDef | ast.ClassDef


def _documented(
    tree: ast.Module, exercise: Exercise, wanted: set[str]
) -> list[tuple[str, Documented]]:
    """A class belongs to the first exercise that has one of its methods."""
    found: list[tuple[str, Documented]] = []
    earlier = {
        name.partition(".")[0]
        for other in exercise.phase.exercises
        if other.file == exercise.file and _number(other) < _number(exercise)
        for name in functions_of(other)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            found.append((node.name, node))
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            named = [(f"{node.name}.{method.name}", method) for method in methods]
            own = [(name, method) for name, method in named if name in wanted]
            if own and node.name not in earlier:
                found.append((node.name, node))
            found += own
    return found


def _number(exercise: Exercise) -> int:
    return int(exercise.id.split(".")[1])


def _file(exercise: Exercise) -> Path:
    return root() / "tests" / f"phase{exercise.phase.number}" / "contract" / f"{exercise.file}.toml"


def _changed(exercise: Exercise) -> int:
    path = _file(exercise)
    return path.stat().st_mtime_ns if path.is_file() else 0


@cache
def _entries(path: Path, changed: int) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if changed else {}


def _asserted(exercise: Exercise, problems: list[str]) -> dict[str, list[str]]:
    """Key → names of the checks that assert it, read from the marks of the check files."""
    found: dict[str, list[str]] = {}
    for path in check_files(exercise):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if not _is_of(mark, exercise.id):
                    continue
                keys = _keys(mark)
                if keys is None:
                    problems.append(f"{node.name}: asserts= must be one string in quotes")
                    continue
                if not keys:
                    problems.append(f"{node.name} asserts no promise")
                for key in keys:
                    found.setdefault(key, []).append(node.name)
    return found


def _is_of(mark: ast.expr, exercise_id: str) -> bool:
    return (
        isinstance(mark, ast.Call)
        and isinstance(mark.func, ast.Name)
        and mark.func.id == "exercise"
        and isinstance(mark.args[0], ast.Constant)
        and mark.args[0].value == exercise_id
    )


def _keys(mark: ast.expr) -> list[str] | None:
    """The keys that a mark names; None if they are not one plain string."""
    assert isinstance(mark, ast.Call)
    for keyword in mark.keywords:
        if keyword.arg == "asserts":
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            return value.split() if isinstance(value, str) else None
    return []
