"""Where the learner defines the function that a check is about."""

from __future__ import annotations

import re
from pathlib import Path

from ..course.catalogue import Exercise, functions_of


def definition(path: Path, exercise: Exercise, check: str, file: str) -> str:
    """Where the learner defines the function that the check is about; "" if it could be several.

    A wrong value has no line of its own. ``path``: the learner's file. ``check``: the source of the
    check. ``file``: the source of its whole file, which counts where a helper makes the call for
    the check.
    """
    try:
        names = functions_of(exercise)
    except ValueError:  # strangers' tests run where nothing tells what the exercise asks for
        return ""
    about = _named(names, check) or ([] if _builds(names, file) else _named(names, file))
    if len(names) > 1 and len(about) != 1:
        return ""
    name = names[0] if len(names) == 1 else about[0]
    owner, _, method = name.rpartition(".")
    found = not owner
    for number, line in enumerate(_lines(path), 1):
        found = found or re.match(rf"class {owner}\b", line) is not None
        if found and re.match(rf"\s*def {method}\(", line):
            return f"{path.name}:{number}: {line.strip()}"
    return ""


def _builds(names: list[str], text: str) -> bool:
    """Whether the text names a class with several of the methods: any of them may be at fault."""
    owners = [name.rpartition(".")[0] for name in names]
    several = {owner for owner in owners if owner and owners.count(owner) > 1}
    return any(re.search(rf"\b{owner}\b", text) for owner in several)


def _named(names: list[str], text: str) -> list[str]:
    """The functions that the text names. A method stands after a dot; the only method of a class
    may stand as its class."""
    owners = [name.rpartition(".")[0] for name in names]
    found = []
    for name, owner in zip(names, owners, strict=True):
        method = name.rpartition(".")[2]
        words = [rf"\.{method}\b" if owner else rf"\b{method}\b"]
        words += [rf"\b{owner}\b"] if owner and owners.count(owner) == 1 else []
        if any(re.search(word, text) for word in words):
            found.append(name)
    return found


def _lines(path: Path) -> list[str]:
    """The file's lines; none if it can't be read (any more)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
