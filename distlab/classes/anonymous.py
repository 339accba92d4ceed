"""A learner's code without anything that shows who wrote it: for a report that a class looks at.

A name is kept if the course itself uses its words, so that code stays readable. Other names become
``name_1``. The names of students are taken out of every text.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed
import torch.nn.functional

from ..course.catalogue import Course

HIDDEN = "…"
SHORT = 2  # letters: so short a part of a name tells nothing about its author
LONG_NUMBER = 5  # digits: it may be the number of a student
WORD = re.compile(r"[^\W\d_]+")
PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][\w.+~-]+){2,}[/\\]?")


def vocabulary(course: Course) -> frozenset[str]:
    """Words of Python, of torch and of the course's own text and code, in lower case."""
    modules = (torch, torch.Tensor, torch.distributed, torch.nn, torch.nn.functional, torch.optim)
    names = [*keyword.kwlist, *dir(builtins), *(name for module in modules for name in dir(module))]
    texts = [" ".join(names)]
    folders = {p.guidelines_path.parent for p in course.exercises}
    base = course.exercises[0].folder if course.exercises else Path()
    for folder in sorted(folders):
        texts += _texts(folder, "*.md") + _texts(base / "solutions" / folder.name, "*.py")
    texts += _texts(base / "given", "*.py")
    return frozenset(part.lower() for text in texts for part in _words_of(text))


def _texts(folder: Path, pattern: str) -> list[str]:
    return [p.read_text(encoding="utf-8", errors="replace") for p in sorted(folder.glob(pattern))]


def _words_of(text: str) -> list[str]:
    """The words of a text or of a name: ``DataLoader`` has two."""
    return WORD.findall(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text))


class Mask:
    """Takes the names of students out. ``secrets``: their ids, and names from their commits."""

    def __init__(self, secrets: Iterable[str], known: frozenset[str]) -> None:
        self.known = known
        whole = {s.strip() for s in secrets if len(s.strip()) > SHORT}
        parts = {p for s in whole for p in _words_of(s.split("@")[0]) if len(p) > SHORT}
        hidden = whole | {p for p in parts if p.lower() not in known}
        self._parts = {p.lower() for p in hidden}
        ordered = sorted(hidden, key=lambda s: (-len(s), s))
        either = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._pattern = re.compile(rf"(?<![^\W_])(?:{either})(?![^\W_])", re.IGNORECASE)

    def text(self, text: str) -> str:
        """A message without names of students, and paths without their folders."""
        short = PATH.sub(lambda m: re.split(r"[/\\]", m[0].rstrip("/\\"))[-1], text)
        return self._pattern.sub(HIDDEN, short)

    def keeps(self, name: str) -> bool:
        """Whether a name in code tells nothing about who wrote it."""
        if self._pattern.search(name) or name.lower() in self._parts:
            return False
        return all(len(part) <= SHORT or part.lower() in self.known for part in _words_of(name))

    def keeps_number(self, text: str) -> bool:
        """Whether a number in code is too short for a student's number."""
        return sum(c.isdigit() for c in text) < LONG_NUMBER
