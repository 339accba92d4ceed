"""The labs that there are, from a small file: the map must not wait for what makes labs.

``python -m scripts.lab_index --write`` writes it; a hand-out has none.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..course.catalogue import root

KINDS = {  # what labs of a kind are, and how one begins
    "debug": ("find the bug", "distlab lab debug"),
    "tests": ("write the test", "distlab lab tests"),
    "review": ("review a change", "distlab lab review"),
    "predict": ("predict the run", "distlab predict"),
}
LETTERS = {"D": "debug", "T": "tests", "R": "review", "P": "predict"}
SOLVED = ("D1.07", "D2.03", "D3.02", "D4.04")  # step by step in labs.md: they count in no class
SLOT = re.compile(r"([DR])(\d) level (\d)")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One lab. ``phase`` is 0, and ``exercise`` empty, for a question about whole runs."""

    id: str
    kind: str
    phase: int
    exercise: str
    level: int
    title: str
    points: float

    @property
    def command(self) -> str:
        """What a learner calls."""
        name = self.id if self.kind in ("debug", "review") else self.id[1:]
        return f"{KINDS[self.kind][1]} {name}"


def index_file() -> Path:
    """Where the list is."""
    return root() / "labs" / "index.json"


def as_text(labs: Iterable[Listed]) -> str:
    """The file's text: one line for each lab."""
    lines = ",\n".join(json.dumps(asdict(lab), ensure_ascii=False) for lab in labs)
    return f"[\n{lines}\n]\n"


@functools.cache
def listed() -> tuple[Listed, ...]:
    """All labs; none where there is no list."""
    try:
        rows = json.loads(index_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    return tuple(Listed(**row) for row in rows)


def fitting(slot: str) -> tuple[Listed, ...]:
    """The labs that a name such as "D1 level 2" may mean; the lab of this id otherwise."""
    found = SLOT.fullmatch(slot)
    if found is None:
        return tuple(lab for lab in listed() if lab.id == slot)
    wanted = LETTERS[found[1]], int(found[2]), int(found[3])
    return tuple(lab for lab in listed() if (lab.kind, lab.phase, lab.level) == wanted)
