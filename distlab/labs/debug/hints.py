"""Three hints for each lab, from general to near."""

from __future__ import annotations

import ast
import random

from ...course import progress
from ..frame import results
from .chosen import DebugLab
from .sources import sources_of

FIRST = {
    1: "A value is wrong. Look for the first value that differs from the expected one, and for the "
    "ranks on which it differs. Then ask which formula gives the number that was seen.",
    2: "The values are right, and the cost is not. Compare time, memory, number of messages and "
    "bytes with the expected ones. Then look in the file for what makes that cost.",
    3: "Something goes wrong under one condition only. Find the first step, epoch, length or world "
    "size at which it shows. Then ask what is different there from what went before.",
    4: "Two bugs show in two places. Look at wrong values and at wrong costs separately, and find "
    "one line for each.",
}
LEFT = 4  # causes that the second hint leaves


def next_hint(lab: DebugLab, seed: int) -> tuple[dict[int, str], list[str]]:
    """The next hint by its number, or all where none is left; warnings if it could not be saved."""
    every = [FIRST[lab.level], _causes(lab, seed), _places(lab)]
    numbered = dict(enumerate(every, 1))
    number = int(results().get(lab.id, {}).get("hints", 0)) + 1
    if number not in numbered:
        return numbered, []
    return {number: numbered[number]}, progress.update_lab(lab.id, hints=number)


def _causes(lab: DebugLab, seed: int) -> str:
    others = sorted({*lab.offered} - {*lab.causes})
    kept = [*random.Random(f"{seed} {lab.id}").sample(others, LEFT - 1), *lab.causes]
    which = "The cause is" if len(lab.wrong) == 1 else "The causes are"
    return f"{which} among these: {', '.join(sorted(kept))}."


def _places(lab: DebugLab) -> str:
    sources = sources_of(lab)
    names = dict.fromkeys(_around(sources.wrong, own[0].first) for own in sources.spots)
    return f"Look at {' and at '.join(names)}."


def _around(text: str, line: int) -> str:
    """The function or class that holds the line, or is nearest below it."""
    nodes = [
        (node.lineno, node.end_lineno or node.lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    inside = [node for node in nodes if node[0] <= line <= node[1] + 1]
    if not inside:
        return f"the lines around {line}"
    begin, _, name = max(inside)
    owner = [node[2] for node in inside if node[0] < begin and node[1] > begin]
    return f"`{'.'.join([*owner, name])}`"
