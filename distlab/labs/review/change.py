"""A change as a reviewer sees it: numbered lines, with the whole function and its contract."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...grading.wrong import patched
from .chosen import Review, shown

AROUND = 3  # lines beside a change that lies in no function


@dataclass(frozen=True)
class Line:
    """One line of a diff: ``sign`` is "-", "+" or " "; numbers of the file before and after."""

    sign: str
    old: int | None
    new: int | None
    text: str


def hunks(before: str, after: str) -> list[list[Line]]:
    """The changed lines, each with its whole function, and with its class's docstring."""
    kept = _context(before)
    found: list[list[Line]] = [[]]
    lines = list(_lines(before.splitlines(), after.splitlines()))
    wanted: set[int] = set()
    last = 0
    for line in lines:
        last = line.old or last
        if line.sign != " ":
            wanted |= kept.get(last, {*range(last - AROUND, last + AROUND + 1)})
    for line in lines:
        if line.sign != " " or line.old in wanted:
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [hunk for hunk in found if hunk]


def _lines(old: Sequence[str], new: Sequence[str]) -> Iterator[Line]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for k in range(i_end - i):
                yield Line(" ", i + k + 1, j + k + 1, old[i + k])
            continue
        for k in range(i, i_end):
            yield Line("-", k + 1, None, old[k])
        for k in range(j, j_end):
            yield Line("+", None, k + 1, new[k])


def _context(text: str) -> dict[int, set[int]]:
    """For each line of a function: the lines that a reader needs, contracts among them.

    These are the function, the docstrings of its class and of that class's methods, and those of
    the file's functions that it calls.
    """
    found: dict[int, set[int]] = {}
    tree = ast.parse(text)
    functions = {node.name: _head(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        methods = [node] if isinstance(node, ast.FunctionDef) else []
        heads: set[int] = set()
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            heads = _head(node).union(*map(_head, methods))
        for each in methods:
            called = {name.id for name in ast.walk(each) if isinstance(name, ast.Name)}
            begin = min([each.lineno, *(d.lineno for d in each.decorator_list)])
            own = {*range(begin, (each.end_lineno or begin) + 2)}  # one more: git asks for it
            known = (functions[name] for name in sorted(called & {*functions}))
            found |= dict.fromkeys(own, (own | heads).union(*known))
    return found


def _head(node: ast.FunctionDef | ast.ClassDef) -> set[int]:
    """The lines of its name, its parameters and its docstring; none if it has no docstring."""
    if ast.get_docstring(node) is None:
        return set()
    return {*range(node.lineno, (node.body[0].end_lineno or node.lineno) + 1)}


def numbered(found: Sequence[Sequence[Line]]) -> str:
    """The hunks as text: number before, number after, sign, line."""
    parts = []
    for hunk in found:
        rows = [f"{each.old or '':>4} {each.new or '':>4} {each.sign} {each.text}" for each in hunk]
        parts.append("\n".join(row.rstrip() for row in rows))
    return "\n     ⋮\n".join(parts)


def unified(found: Sequence[Sequence[Line]], name: str) -> str:
    """The hunks as a patch that ``git apply`` takes."""
    out = [f"--- a/{name}", f"+++ b/{name}"]
    for hunk in found:
        if all(line.sign == " " for line in hunk):
            continue
        old = [line.old for line in hunk if line.old]
        new = [line.new for line in hunk if line.new]
        out.append(f"@@ -{old[0]},{len(old)} +{new[0]},{len(new)} @@")
        out += [line.sign + line.text for line in hunk]
    return "\n".join(out) + "\n"


def faults(review: Review) -> set[int]:
    """The lines that may be named for the defect; below zero: a line of the file before.

    Of a line that the defect takes away also the two lines between which it was, and of one that
    it moves the line where it was.
    """
    if review.mutant is None:
        return set()
    solution, faulty = review.texts()
    after = faulty.splitlines()
    alone = shown(patched(review.mutant))
    found = {-k - 1 for i, i_end, _, _ in _changed(solution, alone) for k in range(i, i_end)}
    for _, _, j, j_end in _changed(review.without_defect(), faulty):
        found |= {*range(j + 1, j_end + 1)} or {j, j + 1}
        made = {after[k] for k in range(j, j_end)}
        found |= {
            -line.old
            for line in _lines(solution.splitlines(), after)
            if line.sign == "-" and line.old and line.text in made
        }
    return found


def _changed(old: str, new: str) -> Iterator[tuple[int, int, int, int]]:
    """Begin and end of what differs, in ``old`` and in ``new``."""
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            yield i, i_end, j, j_end
