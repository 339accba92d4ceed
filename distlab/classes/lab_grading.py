"""Grade the labs that a student has handed in.

Answers and predictions are data. Mended programs, and tests that a student wrote, run in a sandbox
as every submission does.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..course.catalogue import load_course
from ..grading.run import grade
from ..grading.session import Request
from ..grading.verdicts import Report
from ..labs.debug import graded as debug
from ..labs.debug.folder import ANSWER
from ..labs.frame import Part
from ..labs.index import Listed
from ..labs.predict.answers import from_file
from ..labs.predict.graded import answered
from ..labs.predict.graded import graded as predicted
from ..labs.predict.machines import Question
from ..labs.predict.screen import asked_of
from ..labs.predict.sheets import subject_of
from ..labs.review.answer import graded as reviewed
from ..labs.review.answer import read_answer
from ..labs.review.chosen import review_called
from ..labs.written import command as written
from ..labs.written.jury import jury
from ..labs.written.look import look
from ..sandbox import Limits
from .archives import LABS as FOLDER
from .config import ClassConfig
from .lab_rules import LabResult, labs_for, seed_of
from .submissions import Submission

OWN = "run the exercise's checks on your program to see more"


def grade_labs(
    submission: Submission, config: ClassConfig, limits: Limits | None
) -> tuple[LabResult, ...]:
    """The result of each lab that counts. ``limits``: of the sandbox; None: there is none."""
    owner = submission.student
    seed = seed_of(config.seed, owner)
    mine = labs_for(config.labs, config.released, config.seed, owner)
    home = submission.folder / FOLDER
    return tuple(_graded(name, lab, home, seed, limits) for name, lab in mine.items())


def _graded(name: str, lab: Listed, home: Path, seed: int, limits: Limits | None) -> LabResult:
    path = home / file_of(lab)
    try:
        if not path.is_file():
            raise ValueError(f"nothing was handed in: there is no {FOLDER}/{file_of(lab)}")
        if lab.kind == "debug":
            parts = _debug(lab, path.parent, limits)
        elif lab.kind == "review":
            parts = reviewed(review_called(lab.id), read_answer(path))
        elif lab.kind == "tests":
            parts = _written(lab, path, seed, limits)
        else:
            parts = _predicted(lab, path, seed)
    except (ValueError, RuntimeError, OSError) as error:
        return LabResult(name, lab.id, problem="; ".join(str(error).splitlines()))
    most = sum(part.most for part in parts)
    lines = tuple(f"{p.name} {p.points:g} of {p.most:g}: {p.text}" for p in parts)
    return LabResult(name, lab.id, sum(part.points for part in parts) / most, lines)


def file_of(lab: Listed) -> str:
    """The file in the folder of labs without which nothing was handed in."""
    if lab.kind == "tests":
        return f"tests_for_{lab.exercise.replace('.', '_')}.py"
    return f"{lab.id}.toml" if lab.kind == "predict" else f"{lab.id}/{ANSWER}"


def _debug(lab: Listed, folder: Path, limits: Limits | None) -> Sequence[Part]:
    made_for, _ = debug.read_mark(folder)
    if made_for.id != lab.id:
        raise ValueError(
            f"{FOLDER}/{lab.id} holds lab {made_for.id}: hand in the lab you were given"
        )

    def walled(phase: int, request: Request) -> Report:
        """Links to solutions don't work in a sandbox, and nothing that ranks said is told: code
        that is not the learner's runs beside them."""
        with tempfile.TemporaryDirectory(prefix="distlab-lab-") as name:
            impl = Path(name, "all")
            shutil.copytree(request.impl, impl)
            report = grade(phase, replace(request, impl=str(impl), sandbox=limits))
        for check in (check for result in report.exercises for check in result.checks):
            check.message = OWN
        return report

    return debug.graded(folder, grade if limits is None else walled)[2]


def _written(lab: Listed, path: Path, seed: int, limits: Limits | None) -> Sequence[Part]:
    """By the wrong implementations, which are here."""
    exercise = load_course().exercise(lab.exercise)
    look(exercise, path)
    with jury(exercise, [path], limits=limits) as by:
        outcome = written.grade(by, written.chosen()[exercise.id], seed)
    return written.parts_of(outcome, written.lab_of(exercise).points)


def _predicted(lab: Listed, path: Path, seed: int) -> Sequence[Part]:
    """One part for each number: the solution runs, and no learner's code."""
    subject = subject_of(lab.id)
    given = from_file(path, {name: unit for name, _, unit in asked_of(subject)})
    if isinstance(subject, Question):
        outcomes = [answered(subject, given["answer"])]
    else:
        outcomes = predicted(subject, seed, given, "solutions")
    return [
        Part(
            o.name, float(o.right), 1, "right" if o.right else f"off by a factor of {o.factor:.3g}"
        )
        for o in outcomes
    ]
