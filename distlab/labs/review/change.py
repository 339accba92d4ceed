"""A change as a reviewer sees it: numbered lines, with the whole function and its contract."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The changed lines, each with its whole function and the contracts that it rests on."""
    lines = list(_lines(before.splitlines(), after.splitlines()))
    old = _wanted(before, [(line.old, line.sign != " ") for line in lines])
    new = _wanted(after, [(line.new, line.sign != " ") for line in lines])
    found: list[list[Line]] = [[]]
    for line in lines:
        if line.sign != " " or line.old in old or line.new in new:
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [hunk for hunk in found if hunk]


def _wanted(text: str, lines: Iterable[tuple[int | None, bool]]) -> set[int]:
    """What is shown of a file whose lines have these numbers (None: in the other file alone).

    The flag says that a line is changed.
    """
    kept = _context(text)
    wanted: set[int] = set()
    last = 0
    for number, changed in lines:
        last = number or last
        if changed:
            wanted |= kept.get(last, {*range(last - AROUND, last + AROUND + 1)})
    return wanted


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

    These are the function, the head of its class, and the heads of what it calls in this file and
    of the methods that share its state.
    """
    found: dict[int, set[int]] = {}
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for each in functions.values():
        own = _whole(each)
        found |= dict.fromkeys(own, own | _heads(each, functions))
    for node in classes.values():
        bases = [classes[n.id] for n in node.bases if isinstance(n, ast.Name) and n.id in classes]
        mine = _methods(node)
        inherited = {name: m for base in bases for name, m in _methods(base).items()}
        for each in mine.values():
            own = _whole(each)
            known = own | _head(node) | _heads(each, functions) | _mates(each, mine, inherited)
            found |= dict.fromkeys(own, known)
    return found


def _heads(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> set[int]:
    """The heads of the file's functions that it calls."""
    called = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return set().union(*(_head(functions[name]) for name in called & {*functions}))


def _mates(
    node: ast.FunctionDef,
    mine: Mapping[str, ast.FunctionDef],
    inherited: Mapping[str, ast.FunctionDef],
) -> set[int]:
    """What a reader needs of other methods: those that it calls, and those that set what it sets.

    A constructor sets everything, so it has only what it calls. A method without a docstring is
    shown whole if it is called.
    """
    called: set[int] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            above = isinstance(each.value, ast.Call) and ast.unparse(each.value) == "super()"
            method = (inherited if above else {**inherited, **mine}).get(each.attr)
            if method is not None and (above or ast.unparse(each.value) == "self"):
                called |= _head(method) or _whole(method)
        elif isinstance(each, ast.Name) and f"__{each.id}__" in mine:  # len(self)
            called |= _head(mine[f"__{each.id}__"])
    others = [m for m in mine.values() if "__init__" not in (m.name, node.name)]
    return called.union(*(_head(m) for m in others if _set_by(m) & _set_by(node)))


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def _set_by(node: ast.FunctionDef) -> set[str]:
    """The attributes that it sets."""
    attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return {each.attr for each in attributes if isinstance(each.ctx, ast.Store)}


def _whole(node: ast.FunctionDef) -> set[int]:
    """All its lines, and one more: git asks for it."""
    begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return {*range(begin, (node.end_lineno or begin) + 2)}


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
