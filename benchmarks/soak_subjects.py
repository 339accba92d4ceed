"""The subjects of the soak: the solutions of each phase, and the alternatives on gloo ranks."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distlab.course.catalogue import Exercise, load_course, root
from distlab.grading.run import run_session
from distlab.grading.session import Request
from distlab.grading.wrong import beside_solutions

from .soak_book import key_of

GOAL, GOAL_OF_ALTERNATIVES = 20, 5  # gradings, idle and loaded each
WORTH_NOTHING = ("needs", "blocked")  # verdicts of checks that did not run
ALTERNATIVES = root() / "tests" / "alternatives"


@dataclass(frozen=True)
class Subject:
    """The code of one grading: a phase's solutions, or an alternative of one exercise."""

    name: str
    impl: str
    phase: int
    exercise: str = ""
    goal: int = GOAL

    def grade(self, seed: int) -> list[dict[str, Any]]:
        """The verdicts of one grading, in this process."""
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            request = self._request(seed, Path(folder))
            report = run_session(load_course().phase(self.phase), request)
        if report.notes:
            raise RuntimeError("; ".join(report.notes))
        return [
            {"exercise": e.id, "check": c.name, "verdict": c.verdict, "message": c.message}
            for e in report.exercises
            for c in e.checks
            if c.name and c.verdict not in WORTH_NOTHING
        ]

    def _request(self, seed: int, folder: Path) -> Request:
        if not self.exercise:
            return Request(impl=self.impl, device="cpu", seed=seed)
        chosen = load_course().exercise(self.exercise)
        return beside_solutions(Path(self.impl), chosen, folder, seed=seed, tier="gloo")

    def key(self, exercise: str, check: str) -> list[str]:
        """The key of a check: a hash of all that its verdict depends on."""
        chosen = load_course().exercise(exercise)
        own = Path(self.impl).glob("*.py") if self.exercise else ()
        return key_of(_file_of(chosen, check), [*_solutions(chosen), *own])


def subjects(phases: Sequence[int], alternatives: bool) -> list[Subject]:
    """The phases' solutions, and the alternatives of their exercises."""
    found = [Subject(f"phase {n}", "solutions", n) for n in phases]
    for path in sorted(ALTERNATIVES.glob("*/*.py")) if alternatives else ():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        for exercise in first.partition("for: ")[2].split(", "):
            phase = load_course().exercise(exercise).phase.number
            name = f"{path.parent.name} {exercise}"
            if phase in phases and _on_gloo(load_course().exercise(exercise)):
                found.append(Subject(name, str(path.parent), phase, exercise, GOAL_OF_ALTERNATIVES))
    return found


def _on_gloo(exercise: Exercise) -> bool:
    """Whether a check of the exercise runs on gloo ranks (it does if it names no tier)."""
    text = "".join(p.read_text(encoding="utf-8") for p in root().glob(exercise.checks_glob))
    tiers = re.findall(rf'@exercise\("{re.escape(exercise.id)}"(?:, "([^"]*)")?\)', text)
    return any("gloo" in (named or "gloo") for named in tiers)


def _file_of(exercise: Exercise, check: str) -> Path:
    """The file that a check is in."""
    name = check.partition("[")[0]
    files = sorted(root().glob(exercise.checks_glob))
    return next(p for p in files if f"def {name}(" in p.read_text(encoding="utf-8"))


def _solutions(exercise: Exercise) -> list[Path]:
    """The solutions of the exercise and of all that it builds on."""
    found, todo = {exercise.id: exercise}, [exercise]
    while todo:
        one = todo.pop()
        for other in map(load_course().exercise, (*one.uses, *one.requires)):
            if other.id not in found:
                found[other.id] = other
                todo.append(other)
    return sorted({e.solution_path for e in found.values()})
