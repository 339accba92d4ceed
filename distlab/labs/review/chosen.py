"""The changes that were chosen by hand to be reviewed: ``labs/review/phaseN.toml``.

A change is made of the solution: harmless parts (text that becomes other text), and for half of
them one wrong implementation. Its number tells nothing of which half it belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...course.frames import STEP
from ...course.regions import END, START
from ...grading.wrong import Mutant, all_mutants, patched
from ..frame import Lab, data_files, read_toml

KIND = "review"


@dataclass(frozen=True, kw_only=True)
class Review(Lab):
    """One change: ``description`` as in a pull request, ``why`` is told after the answer.

    ``parts`` are harmless replacements. ``mutant`` is the defect, which lies on one of ``axes``;
    without one the change is harmless.
    """

    description: str
    why: str
    parts: tuple[tuple[str, str], ...]
    mutant: Mutant | None
    axes: tuple[str, ...]

    @property
    def program(self) -> Mutant:
        """All that is changed, as one replacement after another: first that of the defect."""
        if self.mutant is not None:
            return dataclasses.replace(self.mutant, more=(*self.mutant.more, *self.parts))
        (text, becomes), *more = self.parts
        return Mutant(
            id=self.id,
            exercise=self.exercise,
            mistake="",
            text=text,
            becomes=becomes,
            caught_by="",
            told_as="",
            more=more,
        )

    def texts(self) -> tuple[str, str]:
        """The file before and after the change, as they are shown."""
        before = self.about.solution_path.read_text(encoding="utf-8")
        return shown(before), shown(patched(self.program))

    def file(self, secret: Collection[str]) -> str:
        """The whole file after the change, without what exercises in ``secret`` ask for."""
        return shown(patched(self.program), secret)

    def without_defect(self) -> str:
        """The file after the harmless parts alone, as it is shown."""
        if self.mutant is not None and not self.parts:
            return self.texts()[0]
        return shown(patched(dataclasses.replace(self, mutant=None).program))


def shown(text: str, secret: Collection[str] = ()) -> str:
    """A solution without the markers and steps of its exercises: a program like any other.

    What the exercises in ``secret`` ask for is left out; no line gets another number by that.
    """
    kept, inside = [], ""
    for line in text.splitlines():
        begins = START.match(line)
        if begins or END.match(line):
            inside = begins["id"] if begins else ""
            hidden = "...  # not done yet"
        elif not (inside and line.lstrip().startswith(STEP)):
            if inside in secret:
                line = line[: len(line) - len(line.lstrip())] + hidden if hidden else ""
                hidden = ""
            kept.append(line)
    return "\n".join(kept) + "\n"


@cache
def all_reviews() -> tuple[Review, ...]:
    """All of them, phase by phase; ValueError where there are none."""
    mutants = {mutant.id: mutant for mutant in all_mutants()}
    return tuple(
        _review(entry, mutants) for path in data_files(KIND) for entry in read_toml(path)[KIND]
    )


def _review(entry: dict[str, Any], mutants: dict[str, Mutant]) -> Review:
    name = entry.get("mutant")
    return Review(
        id=entry["id"],
        kind=KIND,
        exercise=entry["exercise"],
        level=entry["level"],
        title=entry["title"],
        description=" ".join(entry["description"].split()),
        why=entry["why"],
        parts=tuple((part["text"], part["becomes"]) for part in entry.get("part", ())),
        mutant=None if name is None else mutants[name],
        axes=tuple(entry.get("axes", ())),
    )


def review_called(lab_id: str) -> Review:
    """The one with this id; ValueError if there is none."""
    for review in all_reviews():
        if review.id == lab_id:
            return review
    raise ValueError(f"there is no review {lab_id}: distlab lab review --list shows all")
