"""The part of a solution that is shown after an exercise: whole functions,
without region markers."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass

from .catalogue import Exercise
from .regions import Region, functions_in, regions_of


@dataclass(frozen=True)
class Excerpt:
    """One function of a solution; ``line``: where it begins in the file."""

    name: str
    line: int
    text: str


def excerpts(exercise: Exercise, secret: Collection[str] = ()) -> list[Excerpt]:
    """The functions that hold the exercise's regions, each once and whole, in order.

    ``secret``: exercises whose regions in these functions stay hidden.
    """
    text = exercise.solution_path.read_text(encoding="utf-8")
    return excerpts_of(text, exercise.id, secret)


def excerpts_of(text: str, exercise: str, secret: Collection[str] = ()) -> list[Excerpt]:
    """``excerpts`` of a solution's text."""
    regions = regions_of(text)
    found = []
    for name, node in functions_in(ast.parse(text)):
        inside = [r for r in regions if r.within(node)]
        if any(r.exercise == exercise for r in inside):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = text.splitlines()[: node.end_lineno]
            for region in reversed(inside):
                lines[region.start - 1 : region.end] = _shown(lines, region, secret)
            shown = textwrap.dedent("\n".join(lines[first - 1 :]))
            found.append(Excerpt(name, first, shown))
    return found


def _shown(lines: list[str], region: Region, secret: Collection[str]) -> list[str]:
    """A region without its markers, or a line that names the hidden exercise."""
    if region.exercise not in secret:
        return lines[region.start : region.end - 1]
    indent = re.match(r"\s*", lines[region.start - 1])
    assert indent is not None
    return [f"{indent[0]}...  # exercise {region.exercise}"]
