"""The graders of a class: the course's own checks on one submission."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from ..course.catalogue import Phase, load_course
from ..grading.session import Request
from ..grading.verdicts import CheckResult, ExerciseResult, Report, dumped, loaded
from ..grading.warm import WarmGrader
from ..host.terminal import short
from ..sandbox import Limits
from .config import ClassConfig
from .lab_grading import grade_labs
from .results import StudentReports
from .submissions import Submission


class ClassGrader:
    """Grades in child processes of this process. ``walls``: learners' code runs in a sandbox.
    ``container``: this machine is a container, and the code runs as another user.

    Checks are collected once for each phase, and stay collected.
    """

    def __init__(self, walls: bool = True, container: bool = False) -> None:
        self.walls, self.container = walls, container
        self.warm: dict[int, WarmGrader] = {}

    def __call__(self, submission: Submission, config: ClassConfig) -> StudentReports:
        if not self.walls:
            most = int(config.caps.memory_gb * 2**30)
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        reports = []
        for number in config.phases:
            phase = load_course().phase(number)
            try:
                reports.append(self._graded(phase, submission, config))
            except RuntimeError as error:
                return StudentReports(problem=f"phase {number}: {error}")
        labs = grade_labs(submission, config, self._limits(config)) if config.labs else ()
        return StudentReports(tuple(reports), labs)

    def _limits(self, config: ClassConfig) -> Limits | None:
        """Those of a sandbox; None without one."""
        most = int(config.caps.memory_gb * 2**30)
        return Limits(memory_bytes=most, container=self.container) if self.walls else None

    def _graded(self, phase: Phase, submission: Submission, config: ClassConfig) -> Report:
        chosen = tuple(e.id for e in config.exercises() if e.phase.number == phase.number)
        if phase.number not in submission.phases:
            return _not_handed_in(phase, chosen, config)
        elsewhere = [
            e.id for e in load_course().exercises if e.phase.number not in submission.phases
        ]
        request = Request(
            impl=str(submission.folder),
            device="cpu",
            seed=config.seed,
            exercises=chosen,
            known=frozenset(elsewhere),  # code of another phase is taken from the solution
            partial=config.partial,
            sandbox=self._limits(config),
        )
        warm = self.warm.setdefault(phase.number, WarmGrader())
        return as_learners_see(warm.grade(phase.number, request), submission.folder)


def _not_handed_in(phase: Phase, chosen: tuple[str, ...], config: ClassConfig) -> Report:
    report = Report(phase.number, "templates", config.seed, "cpu")
    for exercise in phase.exercises:
        if exercise.id in chosen:
            check = CheckResult("", "blank", f"{phase.folder} was not handed in", "blank")
            result = ExerciseResult(
                exercise.id,
                exercise.title,
                exercise.points,
                f"{phase.folder}/template_{exercise.file}.py",
                checks=[check],
            )
            report.exercises.append(result)
    return report


def as_learners_see(report: Report, folder: Path) -> Report:
    """The report with the names of a learner's own course instead of those of this machine."""
    text = dumped(report)
    for name in (str(folder), short(folder)):
        text = text.replace(json.dumps(f"{name}/")[1:-1], "")
    return replace(loaded(text), impl="templates")
