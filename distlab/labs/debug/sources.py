"""The text of a lab's file without what gives the bug away, and where the bug is in it."""

from __future__ import annotations

import difflib
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass

from ...course.regions import regions_of
from .chosen import DebugLab

NEAR = 2  # lines beside the wrong ones that are accepted as well


@dataclass(frozen=True)
class Spot:
    """Lines (from 1) of the handed-out file, both ends included, where one bug is.

    ``gap``: something is missing before ``first``, so that the line before it counts as well.
    """

    first: int
    last: int
    gap: bool = False

    def near(self, line: int) -> bool:
        """Whether a learner who names ``line`` has found it."""
        return self.first - self.gap - NEAR <= line <= self.last + NEAR


@dataclass(frozen=True)
class Sources:
    """``right`` and ``wrong`` are what is run and handed out; ``spots``: of each bug."""

    right: str
    wrong: str
    spots: tuple[tuple[Spot, ...], ...]


def sources_of(lab: DebugLab) -> Sources:
    """The lab's file as it should be, as it is, and where they differ; ValueError if a wrong
    implementation no longer fits its solution."""
    text = lab.about.solution_path.read_text(encoding="utf-8")
    right = cleaned(text, lab)
    alone, all_wrong = [], text
    for mutant in lab.wrong:
        one = text
        for find, becomes in ((mutant.text, mutant.becomes), *mutant.more):
            if all_wrong.count(find) != 1:
                raise ValueError(f"lab {lab.id}: {mutant.id} no longer fits {lab.about.file}.py")
            one, all_wrong = one.replace(find, becomes), all_wrong.replace(find, becomes)
        alone.append(cleaned(one, lab))
    wrong = cleaned(all_wrong, lab)
    both, end = _changes(right, wrong), wrong.count("\n")
    spots = []
    for one in alone:
        own = [(i1, i2) for i1, i2, _, _ in _changes(right, one)]
        spots.append(
            tuple(
                Spot(min(j1 + 1, end), min(max(j2, j1 + 1), end), gap=j1 == j2)
                for i1, i2, j1, j2 in both
                if any(i1 - NEAR <= b and a <= i2 + NEAR for a, b in own)
            )
        )
    return Sources(right, wrong, tuple(spots))


def changed_lines(before: str, after: str) -> int:
    """How many lines of code differ: moved ones once, comments and empty lines not at all."""
    old, new = (_code(text).splitlines() for text in (before, after))
    changes = _changes("\n".join(old), "\n".join(new))
    gone = Counter(line.strip() for i1, i2, _, _ in changes for line in old[i1:i2])
    come = Counter(line.strip() for _, _, j1, j2 in changes for line in new[j1:j2])
    moved = (gone & come).total()
    return max((gone - come).total(), (come - gone).total()) + moved


def _changes(before: str, after: str) -> list[tuple[int, int, int, int]]:
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), False)
    return [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]


def cleaned(text: str, lab: DebugLab) -> str:
    """The text without the marks of exercises, and without comments where the learner would write:
    they say how the right code works. Names of files and exercises become the lab's."""
    inside = {n for r in regions_of(text) for n in range(r.start, r.end + 1)}
    lines = _without_comments(text, inside)
    text = "\n".join(lines) + "\n"
    text = re.sub(r"\bexercises? \d+\.\d+", "another file", text)
    own = rf"({lab.about.phase.folder}\.){lab.about.file}\b"
    return re.sub(own, rf"\g<1>{lab.name}", text)


def _code(text: str) -> str:
    lines = _without_comments(text, set(range(1, text.count("\n") + 2)))
    return "\n".join(line for line in lines if line.strip())


def _without_comments(text: str, where: set[int]) -> list[str]:
    lines: list[str | None] = list(text.splitlines())
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return text.splitlines()
    for token in tokens:
        number, column = token.start
        if token.type == tokenize.COMMENT and number in where:
            rest = token.line[:column].rstrip()
            lines[number - 1] = rest or None
    return [line for line in lines if line is not None]
