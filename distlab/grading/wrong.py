"""Wrong implementations: small patches of the solution, each killed by the check that it names.

They prove that the checks can fail, and that the learner is told the right cause.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..course.catalogue import Exercise, load_course, root
from .run import grade
from .session import Request
from .verdicts import CheckResult, Report


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong implementation.

    ``bug`` names it (with its number in the list of bugs, if it has one); ``find`` occurs exactly
    once in the solution and is replaced by ``replace`` (``patches``: further pairs); ``killed_by``
    is the check that must fail, with ``cause``.
    """

    id: str
    exercise: str
    bug: str
    find: str
    replace: str
    killed_by: str
    cause: str
    patches: Sequence[tuple[str, str]] = ()


def mutants_of(exercise: str, prefix: str) -> Callable[..., Mutant]:
    """A function that makes mutants of one exercise: ``(name, bug, find, replace, killed_by,
    cause, *patches)``; their ids are ``prefix-name``."""

    def mutant(
        name: str,
        bug: str,
        find: str,
        replace: str,
        killed_by: str,
        cause: str,
        *patches: tuple[str, str],
    ) -> Mutant:
        return Mutant(
            id=f"{prefix}-{name}",
            exercise=exercise,
            bug=bug,
            find=find,
            replace=replace,
            killed_by=killed_by,
            cause=cause,
            patches=patches,
        )

    return mutant


def all_mutants(folder: Path | None = None) -> list[Mutant]:
    """The mutants of all phases, in order."""
    found: list[Mutant] = []
    for path in sorted((folder or root() / "tests" / "mutants").glob("phase*_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.MUTANTS
    return found


def mutants_per_exercise() -> dict[str, int]:
    """How many wrong implementations each exercise has."""
    return dict(Counter(m.exercise for m in all_mutants()))


def patched(mutant: Mutant) -> str:
    """The solution's text with the mutant's patches; ValueError if one doesn't occur just once."""
    path = load_course().exercise(mutant.exercise).solution_path
    text = path.read_text(encoding="utf-8")
    for find, replace in ((mutant.find, mutant.replace), *mutant.patches):
        if text.count(find) != 1:
            raise ValueError(
                f"mutant {mutant.id}: its text occurs {text.count(find)} times in {path.name}"
            )
        text = text.replace(find, replace)
    return text


def beside_solutions(own: Path, exercise: Exercise, folder: Path, **options: Any) -> Request:
    """What to ask a grader of one exercise by the files in ``own``, and of nothing it builds on.

    ``folder`` (empty) takes them, and solutions of the phase where ``own`` has none.
    """
    _fill(folder, own)
    _fill(folder, exercise.solution_path.parent)
    others = frozenset(e.id for e in load_course().exercises if e.id != exercise.id)
    return Request(
        impl=str(folder), device="cpu", exercises=(exercise.id,), known=others, **options
    )


def _fill(folder: Path, source: Path) -> None:
    """Link the modules of ``source`` into ``folder``, but for those that it has."""
    for path in source.glob("*.py"):
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path.resolve())


def run_mutant(
    mutant: Mutant,
    folder: Path,
    seed: int | None = None,
    grade: Callable[[int, Request], Report] = grade,
) -> CheckResult | None:
    """Grade the mutant by its named check; ``folder`` (empty) takes the implementation.

    ``grade``: that of a ``WarmGrader``, where many are graded.
    """
    exercise = load_course().exercise(mutant.exercise)
    (folder / exercise.solution_path.name).write_text(patched(mutant), encoding="utf-8")
    _fill(folder, exercise.solution_path.parent)
    request = Request(
        impl=str(folder),
        device="cpu",
        seed=seed,
        exercises=(mutant.exercise,),
        checks=(mutant.killed_by,),
        trusted=True,
    )
    return grade(exercise.phase.number, request).check(mutant.killed_by)
