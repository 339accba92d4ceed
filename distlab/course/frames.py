"""Divide a template, or a learner's file made from it, into its regions and the text around them.

A region is a gap of a template that the learner fills: its ``# Step`` lines and its ``raise
NotImplementedError``. It is known by its function, so it may stand elsewhere in another version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RAISE = re.compile(r'^\s*raise NotImplementedError\("exercise (?P<id>\d+\.\d+)"\)\s*$')
DEFINED = re.compile(r"^(?P<indent> {0,4})(?:async )?(?P<kind>def|class) (?P<name>\w+)")
STEP = ("# Step", "#    ")


def mark_of(gap: Gap) -> str:
    """The line that stands for a region in the text around it. It is
    indented like a method's body."""
    return f"        # --- region {gap.number} of {gap.function} ---"


@dataclass(frozen=True)
class Gap:
    """A region of a template: its function, and the text around it there."""

    exercise: str
    function: str
    number: int  # of the regions of the function
    text: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """The key by which a region is known."""
        return self.function, self.number


@dataclass(frozen=True)
class Function:
    """The lines of one function: ``first`` is its ``def``, ``end`` the line behind it."""

    name: str
    first: int
    end: int


def functions(lines: Sequence[str]) -> dict[str, Function]:
    """Functions and methods by their qualified names; the text need not be valid Python."""
    found: dict[str, Function] = {}
    owner = ""
    for number, line in enumerate(lines):
        match = DEFINED.match(line)
        if match is None:
            continue
        if match["kind"] == "class":
            owner = match["name"] if not match["indent"] else owner
        elif not match["indent"] or (len(match["indent"]) == 4 and owner):
            owner = owner if match["indent"] else ""
            name = f"{owner}.{match['name']}" if owner else match["name"]
            found[name] = Function(name, number, _end(lines, number, len(match["indent"])))
    return found


def _end(lines: Sequence[str], first: int, indent: int) -> int:
    """The line behind the function that begins at ``first``, without blank lines after it."""
    end = first + 1
    for number in range(first + 1, len(lines)):
        line = lines[number]
        if not line.strip():
            continue
        if len(line) - len(line.lstrip()) <= indent and not line.lstrip().startswith(")"):
            break
        end = number + 1
    return end


def gaps(blank: str) -> list[Gap]:
    """The regions of a template, in order."""
    lines = blank.splitlines()
    return [gap for f in functions(lines).values() for gap, _, _ in _gaps_in(lines, f)]


def _gaps_in(lines: Sequence[str], function: Function) -> list[tuple[Gap, int, int]]:
    """The regions of a function, with their lines."""
    found: list[tuple[Gap, int, int]] = []
    for number in range(function.first, function.end):
        match = RAISE.match(lines[number])
        if match:
            start = number
            while lines[start - 1].lstrip().startswith(STEP):
                start -= 1
            text = tuple(lines[start : number + 1])
            gap = Gap(match["id"], function.name, len(found), text)
            found.append((gap, start, number + 1))
    return found


@dataclass
class Opened:
    """A learner's file in parts: own text per region, and the rest with marks
    in place of the regions."""

    own: dict[tuple[str, int], tuple[str, ...]]
    frame: list[str]
    closed: list[tuple[str, str, str]]  # functions changed around regions: name, old, own text


def opened(blank: str, mine: str) -> Opened:
    """Divide a learner's file by the template that it was made from."""
    old, new = blank.splitlines(), mine.splitlines()
    there = functions(new)
    found = Opened({}, list(new), [])
    before = functions(old)
    later = sorted(before, key=lambda name: -there[name].first if name in there else 0)
    for name in later:
        function = before[name]
        inside = _gaps_in(old, function)
        if not inside:
            continue
        body = old[function.first : function.end]
        if name not in there:
            found.closed.append((name, "\n".join(body), ""))
            continue
        target = there[name]
        text = new[target.first : target.end]
        cuts = _cuts(body, [(s - function.first, e - function.first) for _, s, e in inside], text)
        if cuts is None:
            found.closed.append((name, "\n".join(body), "\n".join(text)))
            continue
        for (gap, _, _), (start, end) in zip(inside, cuts, strict=True):
            found.own[gap.key] = tuple(text[start:end])
        found.frame[target.first : target.end] = _marked(text, [p for p, _, _ in inside], cuts)
    return found


def framed(blank: str) -> list[str]:
    """A template with marks that stand for its regions."""
    lines = blank.splitlines()
    for function in reversed(functions(lines).values()):
        inside = _gaps_in(lines, function)
        cuts = [(s - function.first, e - function.first) for _, s, e in inside]
        body = lines[function.first : function.end]
        lines[function.first : function.end] = _marked(body, [p for p, _, _ in inside], cuts)
    return lines


def _marked(
    text: Sequence[str], inside: Sequence[Gap], cuts: Sequence[tuple[int, int]]
) -> list[str]:
    out = list(text)
    for gap, (start, end) in reversed(list(zip(inside, cuts, strict=True))):
        out[start:end] = [mark_of(gap)]
    return out


def _cuts(
    body: Sequence[str], regions: Sequence[tuple[int, int]], text: Sequence[str]
) -> list[tuple[int, int]] | None:
    """Where the regions of ``body`` are in the learner's ``text`` of the same function.

    The text before, between and after them must be as it was; None if it is not.
    """
    edges = [0, *(edge for region in regions for edge in region), len(body)]
    fixed = [body[edges[i] : edges[i + 1]] for i in range(0, len(edges), 2)]
    head, tail = fixed[0], fixed[-1]
    if text[: len(head)] != head or len(text) < len(head) + len(tail):
        return None
    last = len(text) - len(tail)
    if text[last:] != tail:
        return None
    cuts, position = [], len(head)
    for between in fixed[1:-1]:
        starts = range(position, last - len(between) + 1)
        found = [s for s in starts if list(text[s : s + len(between)]) == list(between)]
        if len(found) != 1:
            return None
        cuts.append((position, found[0]))
        position = found[0] + len(between)
    return [*cuts, (position, last)]
