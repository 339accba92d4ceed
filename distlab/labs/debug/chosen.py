"""The debugging labs that were chosen by hand, and the one that a seed deals."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...course.catalogue import Exercise, load_course, root
from ...grading.wrong import Mutant, all_mutants
from ..frame import Lab, data_files, read_toml

KIND = "debug"
OFFERED = 12  # causes to choose from
Ranks = tuple[int, ...]  # none: all of them


@dataclass(frozen=True, kw_only=True)
class DebugLab(Lab):
    """One lab: wrong implementations in one file, and the program that shows them.

    ``causes``: one for each of ``wrong``, of those in ``offered``. ``ranks``: those whose part of
    the report is not as expected (none named: all). ``fine_at``: world sizes at which nothing
    shows. ``run``: further options of the virtual ranks.
    """

    wrong: tuple[Mutant, ...]
    causes: tuple[str, ...]
    offered: Mapping[str, str]
    program: str
    name: str
    world: int
    told: str
    ranks: Ranks = ()
    fine_at: tuple[int, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exercises(self) -> list[Exercise]:
        """All that the mended program is graded by."""
        ids = dict.fromkeys(mutant.exercise for mutant in self.wrong)
        return [load_course().exercise(each) for each in ids]

    @property
    def file(self) -> str:
        """The name of the file with the bug, as it is handed out."""
        return f"{self.name}.py"

    @property
    def program_path(self) -> Path:
        """The program that shows the bug."""
        return root() / "labs" / KIND / "programs" / f"{self.program}.py"


@functools.cache
def all_labs() -> tuple[DebugLab, ...]:
    """The labs of all phases, in order."""
    known = {mutant.id: mutant for mutant in all_mutants()}
    found: list[DebugLab] = []
    for path in data_files(KIND):
        data = read_toml(path)
        wrong = known | _planted(data.get("planted", {}), known, path.name)
        found += [_lab(entry, data["causes"], wrong, path.name) for entry in data["lab"]]
    return tuple(found)


def _planted(
    texts: Mapping[str, list[tuple[str, str]]], known: Mapping[str, Mutant], file: str
) -> dict[str, Mutant]:
    """The wrong implementations that are handed out with another text than that of their checks."""
    try:
        return {
            name: replace(known[name], text=first[0], becomes=first[1], more=more)
            for name, (first, *more) in texts.items()
        }
    except KeyError as error:
        raise ValueError(f"{file}: planted: no wrong implementation {error}") from None


def _lab(
    entry: dict[str, Any], causes: Mapping[str, str], known: Mapping[str, Mutant], file: str
) -> DebugLab:
    try:
        wrong = tuple(known[each] for each in entry.pop("wrong"))
        own, also_true = tuple(entry.pop("causes")), tuple(entry.pop("not_offered", ()))
        more: dict[str, Any] = {k: tuple(entry.pop(k, ())) for k in ("ranks", "fine_at")}
        more["run"] = run = dict(entry.pop("run", {}))
        if "slow_links" in run:  # TOML has no keys that are numbers
            run["slow_links"] = {int(rank): slow for rank, slow in run["slow_links"].items()}
        return DebugLab(
            **entry, **more, kind=KIND, exercise=wrong[0].exercise, wrong=wrong, causes=own,
            offered=_offered(entry["id"], own, causes, also_true),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: lab {entry.get('id')} can't be read: {error}") from None


def _offered(
    lab_id: str, own: tuple[str, ...], causes: Mapping[str, str], also_true: tuple[str, ...]
) -> dict[str, str]:
    """The lab's own causes among others of its phase, without those that describe its bugs as well;
    KeyError if there is no such cause."""
    unknown = {*also_true} - {*causes}
    if unknown:
        raise KeyError(*unknown)
    others = sorted({*causes} - {*own, *also_true})
    more = random.Random(lab_id).sample(others, OFFERED - len(own))
    return {name: causes[name] for name in sorted((*own, *more))}


def lab_called(lab_id: str) -> DebugLab:
    """The lab with this id; ValueError if there is none."""
    for lab in all_labs():
        if lab.id == lab_id:
            return lab
    raise ValueError(f"no lab {lab_id!r}: `distlab lab debug --list` shows all")
