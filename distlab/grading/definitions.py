"""Where the learner defines what a check is about."""

from __future__ import annotations

import re
from pathlib import Path

from ..course.catalogue import Exercise, functions_of


def definition(path: Path, exercise: Exercise, check: str, file: str) -> str:
    """Where the learner defines the function that the check is about.

    A wrong value has no line of its own. ``path``: the learner's file. ``check``, ``file``: the
    source of the check, and of all its file, which counts where the check leaves the call to a
    helper.
    """
    words = re.findall(r"\w+", check)

    def relevance(name: str) -> int:
        head, _, method = name.partition(".")
        return 2 * (head in words) + (method in words)

    names = functions_of(exercise)
    name = max(names, key=relevance)
    if not relevance(name):
        name = max(names, key=lambda name: file.count(name.partition(".")[0]))
    owner, _, about = name.rpartition(".")
    found = not owner
    for number, line in enumerate(_lines(path), 1):
        found = found or re.match(rf"class {owner}\b", line) is not None
        if found and re.match(rf"\s*def {about}\(", line):
            return f"{path.name}:{number}: {line.strip()}"
    return ""


def _lines(path: Path) -> list[str]:
    """The file's lines; none if it can't be read (any more)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
