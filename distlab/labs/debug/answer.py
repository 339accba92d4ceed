"""Read answer.toml: what is missing or misspelt is one clear line each."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..frame import read_toml
from .chosen import DebugLab, Ranks

NEEDED = ("ranks", "file", "line", "cause")
FIELDS = (*NEEDED, "why")


@dataclass(frozen=True)
class Bug:
    """One bug, as the learner sees it; ``ranks``: none for all."""

    ranks: Ranks
    line: int
    cause: str


def read_answer(path: Path, lab: DebugLab, lines: int) -> list[Bug]:
    """The learner's answer; ValueError with one line for each thing that is not as asked.

    ``lines``: of the file that was handed out.
    """
    data = read_toml(path)
    found = [f"unknown field {name!r}{_near(name, ('bug',))}" for name in data if name != "bug"]
    bugs = data.get("bug", [])
    if not isinstance(bugs, list) or not all(isinstance(bug, dict) for bug in bugs):
        raise ValueError(f"{path.name}: write each bug as a table that begins with [[bug]]")
    if len(bugs) != len(lab.wrong):
        found.append(f"this lab has {len(lab.wrong)} [[bug]], and {len(bugs)} are there")
    for number, bug in enumerate(bugs, 1):
        where = f"bug {number}: " if len(bugs) > 1 else ""
        found += [where + text for text in _problems(bug, lab, lines)]
    if found:
        raise ValueError("\n".join(f"{path.name}: {text}" for text in found))
    return [Bug(_ranks(bug["ranks"], lab), bug["line"], bug["cause"]) for bug in bugs]


def _problems(bug: dict[str, Any], lab: DebugLab, lines: int) -> list[str]:
    found = [f"unknown field {n!r}{_near(n, FIELDS)}" for n in bug if n not in FIELDS]
    found += [f"the field {name!r} is missing" for name in NEEDED if name not in bug]
    ranks, line, cause = (bug.get(name) for name in ("ranks", "line", "cause"))
    if "ranks" in bug and not _is_ranks(ranks, lab):
        found.append(f'ranks is "all" or a list of 0 to {lab.world - 1}, not {ranks!r}')
    if bug.get("file", lab.file) != lab.file:
        found.append(f"file is {lab.file!r}, not {bug['file']!r}")
    if "line" in bug and (type(line) is not int or not 1 <= line <= lines):
        found.append(f"line is a number from 1 to {lines}, not {line!r}")
    if "cause" in bug and cause not in lab.offered:
        found.append(
            f"cause is one of the words in the list, not {cause!r}{_near(cause, lab.offered)}"
        )
    return found


def _is_ranks(ranks: Any, lab: DebugLab) -> bool:
    if ranks == "all":
        return True
    every = ranks if isinstance(ranks, list) else [ranks]
    return bool(every) and all(type(r) is int and 0 <= r < lab.world for r in every)


def _ranks(ranks: Any, lab: DebugLab) -> Ranks:
    if ranks == "all":
        return ()
    named = tuple(sorted({*(ranks if isinstance(ranks, list) else [ranks])}))
    return () if named == tuple(range(lab.world)) else named


def _near(word: Any, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
