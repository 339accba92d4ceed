"""Wrong implementations: small patches of the solution. The check that each patch names kills it.

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
    """One wrong implementation: ``text`` becomes ``becomes``. A check catches it and tells a cause.

    ``mistake`` says it in words. ``text`` occurs exactly once in the solution of ``exercise``
    (``more``: further pairs). ``caught_by`` is the check that must fail, with cause ``told_as``, or
    with one of several causes where the order of events decides. ``tier``: the only tier where it
    fails, if that is not the first.
    """

    id: str
    exercise: str
    mistake: str
    text: str
    becomes: str
    caught_by: str
    told_as: str | tuple[str, ...]
    more: Sequence[tuple[str, str]] = ()
    tier: str = ""

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes that may be told."""
        return (self.told_as,) if isinstance(self.told_as, str) else self.told_as


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
    for find, replace in ((mutant.text, mutant.becomes), *mutant.more):
        if text.count(find) != 1:
            raise ValueError(
                f"mutant {mutant.id}: its text occurs {text.count(find)} times in {path.name}"
            )
        text = text.replace(find, replace)
    return text


def beside_solutions(own: Path, exercise: Exercise, folder: Path, **options: Any) -> Request:
    """The request to grade one exercise by the files in ``own``, without the exercises that it
    builds on.

    ``folder`` (empty) takes them, and solutions of the phase where ``own`` has none.
    """
    fill(folder, own)
    fill(folder, exercise.solution_path.parent)
    others = frozenset(e.id for e in load_course().exercises if e.id != exercise.id)
    return Request(
        impl=str(folder), device="cpu", exercises=(exercise.id,), known=others, **options
    )


def fill(folder: Path, source: Path) -> None:
    """Link the modules of ``source`` into ``folder``, except those that are there already."""
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

    ``grade``: the method of a ``WarmGrader``, where many mutants are graded.
    """
    exercise = load_course().exercise(mutant.exercise)
    (folder / exercise.solution_path.name).write_text(patched(mutant), encoding="utf-8")
    fill(folder, exercise.solution_path.parent)
    request = Request(
        impl=str(folder),
        device="cpu",
        seed=seed,
        exercises=(mutant.exercise,),
        checks=(mutant.caught_by,),
        trusted=True,
        tier=mutant.tier,
    )
    return grade(exercise.phase.number, request).check(mutant.caught_by)
