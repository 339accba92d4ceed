"""The choice for a request: which exercises are graded, and where their checks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..course.catalogue import Exercise, Phase, check_files, load_course
from .live import View
from .session import Request, Session
from .verdicts import CheckResult, ExerciseResult, Report


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice for a request: the exercises to grade (``selected``), the same with all that they
    build on (``every``), and the files that hold their checks."""

    phase: Phase
    request: Request
    selected: tuple[str, ...]
    every: list[Exercise]
    files: tuple[str, ...]

    def session(self, view: View | None = None) -> Session:
        """The state of a new run, which is reported to ``view``."""
        ids = tuple(e.id for e in self.every)
        return Session(Request(**vars(self.request) | {"exercises": ids}), load_course(), view=view)

    def report(self, session: Session, notes: Sequence[str] = (), whole: bool = True) -> Report:
        """The results of a run. ``whole``: a selected exercise without results is an error.

        It is no error if one tier was asked for and all checks were loaded (``notes``: problems in
        that).
        """
        device = "cuda" if self.request.device == "cuda" else "cpu"
        number, impl = self.phase.number, self.request.impl
        report = Report(number, impl, session.seed, device, notes=list(notes))
        report.references = session.references
        every_check = whole and not self.request.checks and not self.request.tier
        for exercise in self.every:
            result = session.results.get(exercise.id)
            if exercise.id not in self.selected:
                if every_check and result is not None and result.verdict == "pass":
                    report.along.append(exercise.id)
            elif result is not None:
                report.exercises.append(result)
            elif whole and not self.request.checks and (notes or not self.request.tier):
                report.exercises.append(_unchecked(exercise))
        return report


def plan(phase: Phase, request: Request) -> Plan:
    """Which exercises are graded for this request, and where their checks are."""
    course = load_course()
    selected = request.exercises or tuple(e.id for e in phase.exercises)
    needed = set() if request.trusted else course.prerequisites(selected) - request.known
    every = [e for e in course.exercises if e.id in needed or e.id in selected]
    files = tuple(sorted({str(path) for e in every for path in check_files(e)}))
    return Plan(phase=phase, request=request, selected=selected, every=every, files=files)


def _unchecked(exercise: Exercise) -> ExerciseResult:
    """An exercise without any check that ran is an error of the course, never a pass."""
    check = CheckResult("", "error", "no check of this exercise could be loaded", "error")
    where = exercise.checks_glob
    return ExerciseResult(exercise.id, exercise.title, exercise.points, where, checks=[check])
