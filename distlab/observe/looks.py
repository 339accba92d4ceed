"""Is a rank in an endless loop? Looks at its stack tell, not the clock alone.

A call that is on the stack at every look has not returned in between. If all the lines that were
seen in it lie in one loop, the rank was in that loop all the time. The innermost such call in the
learner's files has the endless loop. A generator that is asked again and again is on the stack at
some of the looks, and it is the same call each time.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .lines import TOOLKIT, TORCH

PAUSES = (0.05, 0.1, 0.15, 0.2, 0.1, 0.05)  # seconds between looks: no rhythm of a loop's own
ENOUGH = 3  # fewer looks prove nothing
ROOT = "rank_main"  # frames outside the function that starts a rank are not the rank's
_FOREIGN = (
    TOOLKIT,
    TORCH,
    sysconfig.get_path("stdlib"),
    "<",
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.While, ast.For, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Call = tuple[str, list[int], int, bool]  # file, lines, at how many looks, whether a generator


class Looks:
    """The calls of one thread that were seen. They are kept alive, so no call
    is mistaken for another."""

    def __init__(self) -> None:
        self.count = 0
        self._calls: dict[FrameType, Call] = {}
        self._stack: list[FrameType] = []

    def take(self, frame: FrameType | None) -> None:
        """Look at the stack whose innermost frame is ``frame``."""
        self.count += 1
        self._stack = []
        while frame is not None and frame.f_code.co_name != ROOT:
            self._stack.append(frame)
            frame = frame.f_back
        for each in reversed(self._stack):
            code = each.f_code
            path, lines, seen, generator = self._calls.pop(each, (code.co_filename, [], 0, False))
            lines = sorted({*lines, each.f_lineno or code.co_firstlineno})
            generator = bool(code.co_flags & inspect.CO_GENERATOR)
            self._calls[each] = path, lines, seen + 1, generator  # the innermost comes last

    def data(self) -> dict[str, Any]:
        """The data that ``endless_loop`` needs, as plain data."""
        return {"count": self.count, "calls": list(self._calls.values())}


def endless_loop(count: int, calls: Sequence[Call], learner_files: Collection[str]) -> str:
    """``"/x/sampler.py:12"``: the loop that a rank did not leave during ``count`` looks.

    Empty if it was in no loop of the learner's, or if the looks prove nothing.
    """
    if count < ENOUGH:
        return ""
    for path, lines, seen, generator in reversed(calls):
        lasted = seen == count or (generator and seen > 1)
        if lasted and _is_mine(path, learner_files):
            number = _loop_around(path, lines)
            if number:
                return f"{path}:{number}"
    return ""


def _is_mine(path: str, learner_files: Collection[str]) -> bool:
    return path in learner_files if learner_files else not path.startswith(_FOREIGN)


def _loop_around(path: str, lines: Sequence[int]) -> int:
    """The line on which the innermost loop around all ``lines`` of one function begins; 0: none."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return 0
    first, last = min(lines), max(lines)
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (*_LOOPS, *_COMPREHENSIONS, *_FUNCTIONS))
        and node.lineno <= first
        and last <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    for kinds in (_LOOPS, _COMPREHENSIONS):  # a statement in the loop's body mostly does not last
        for node in reversed(around):
            if isinstance(node, kinds):
                return node.lineno
            if isinstance(node, _FUNCTIONS):
                break  # a loop around the function is not its own
    return 0
