"""The book of soaking: how often each check has judged right code, and how often wrongly.

A check's count holds for the graded versions: of its file and that file's imports, the
implementation, and the toolkit. When one of these changes, the count begins anew and the book says
why.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from distlab.course.catalogue import root

from .imported import closure, imported

CONDITIONS = ("idle", "loaded", "disturbed")
CONFIDENCE = 0.95
PARTS = ("checks", "implementation", "toolkit")


def upper_bound(runs: int, wrong: int) -> float:
    """The probability of a wrong verdict that 95 % of such samples rule out (Clopper-Pearson).

    1 - 0.05^(1/n) if none of n was wrong, about 3/n; else a quantile of the beta distribution.
    """
    from scipy.special import betaincinv

    if wrong >= runs:
        return 1.0
    return float(betaincinv(wrong + 1, runs - wrong, CONFIDENCE))


@dataclass
class Count:
    """One check of one implementation: runs and wrong verdicts by condition, since ``key``."""

    key: list[str]
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CONDITIONS, 0))
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CONDITIONS, 0))

    @property
    def all_runs(self) -> int:
        """Runs in all conditions."""
        return sum(self.runs.values())

    @property
    def all_wrong(self) -> int:
        """Wrong verdicts in all conditions."""
        return sum(self.wrong.values())


@dataclass
class Book:
    """All counts, by subject and check; ``wrong`` and ``anew`` tell the story."""

    path: Path
    counts: dict[str, dict[str, Count]] = field(default_factory=dict)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    anew: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Book:
        """The book at ``path``; an empty one if there is none. ValueError if it is damaged."""
        if not path.exists():
            return cls(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            counts = {
                what: {check: Count(**count) for check, count in checks.items()}
                for what, checks in data["counts"].items()
            }
            return cls(path, counts, data["wrong"], data["anew"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{path} is no book of soaking ({error}): move it away to begin a new one"
            raise ValueError(message) from None

    def write(self) -> None:
        """Replace the file in one step: an interrupted call loses nothing."""
        data = {
            "counts": {w: {c: asdict(n) for c, n in cs.items()} for w, cs in self.counts.items()},
            "wrong": self.wrong,
            "anew": self.anew,
        }
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=self.path.name, delete=False, encoding="utf-8"
        ) as file:
            json.dump(data, file, indent=0, sort_keys=True)
            file.write("\n")
            os.fchmod(file.fileno(), 0o644)
        os.replace(file.name, self.path)

    def note(self, what: str, verdicts: Iterable[Verdict], condition: str, **story: Any) -> None:
        """Count one grading of ``what``; ``story``: further facts for a wrong verdict."""
        checks = self.counts.setdefault(what, {})
        for verdict in verdicts:
            count = self._current(what, verdict, story)
            count.runs[condition] += 1
            if verdict.wrong:
                count.wrong[condition] += 1
                said = {"what": what, "check": verdict.check, "verdict": verdict.verdict}
                said |= {"message": verdict.message, "condition": condition}
                self.wrong.append(said | story)
            checks[verdict.check] = count

    def _current(self, what: str, verdict: Verdict, story: dict[str, Any]) -> Count:
        """The check's count, begun anew if the graded code has changed."""
        count = self.counts[what].get(verdict.check)
        if count is None:
            return Count(verdict.key)
        if count.key == verdict.key:
            return count
        pairs = zip(PARTS, count.key, verdict.key, strict=True)
        changed = [name for name, before, now in pairs if before != now]
        said = {"what": what, "check": verdict.check, "changed": " and ".join(changed)}
        counted = {"runs": count.all_runs, "wrong": count.all_wrong}
        self.anew.append(said | counted | {k: v for k, v in story.items() if k == "at"})
        return Count(verdict.key)

    def gradings(self, what: str, condition: str, keys: dict[str, list[str]]) -> int:
        """How often all of ``what`` was graded as it is now: the least runs of any of its checks.

        ``keys``: those of today's checks; a check that is not in the book yet counts 0.
        """
        counts = self.counts.get(what, {})
        known = [
            counts[check].runs[condition] if check in counts and counts[check].key == key else 0
            for check, key in keys.items()
        ]
        return min(known, default=0)


@dataclass(frozen=True)
class Verdict:
    """One check's verdict on right code."""

    check: str
    verdict: str
    message: str
    key: list[str]

    @property
    def wrong(self) -> bool:
        """Whether right code did not pass."""
        return self.verdict != "pass"


# -- what a verdict depends on --------------------------------------------------------------------
def key_of(check_file: Path, implementation: Iterable[Path]) -> list[str]:
    """Hashes of the check with its helpers, of the implementation, and of the toolkit."""
    return [
        _digest((check_file, *_helpers(check_file))),
        _digest(tuple(sorted(implementation))),
        _digest(_toolkit()),
    ]


@cache
def _helpers(check_file: Path) -> tuple[Path, ...]:
    """Modules of its folder that a check file imports, also indirectly, and the folder's set-up."""
    set_up = [p for p in [check_file.parent / "conftest.py"] if p.exists()]
    return tuple(sorted(closure([check_file, *set_up], check_file.parent) - {check_file}))


@cache
def _toolkit() -> tuple[Path, ...]:
    """The files of toolkit and given code that grading or a check imports, also
    indirectly, and the map."""
    homes = [root() / "distlab", root() / "given"]
    begin = [homes[0] / "grading" / f"{name}.py" for name in ("__init__", "run", "plugin")]
    for check_file in root().glob("tests/phase*/*.py"):
        modules = imported(check_file, root())
        begin += [p for p in modules if any(p.is_relative_to(home) for home in homes)]
    return tuple(sorted(closure(begin, root()) | {root() / "course.toml"}))


@cache
def _digest(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
