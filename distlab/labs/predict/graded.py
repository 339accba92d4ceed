"""Predictions beside the run: which program runs, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping

from ...course import progress
from ...course.catalogue import Exercise, has_solutions, load_course
from ...grading.implementation import Implementation, protect_this_process
from ...grading.sources import Source, blank_lines, find_source
from ...host.terminal import short
from ...ranks.results import RankFailure
from .catalogue import TIMED
from .machines import ANSWERS, TIMED_ANSWERS, Question
from .outcome import Outcome
from .scene import Scene


def chosen_impl(exercise: Exercise) -> str:
    """The learner's own program where it passed, else the solution if it is here."""
    mine = progress.entry(exercise.id).get("verdict") == "pass"
    return "templates" if mine or not has_solutions() else "solutions"


def runnable(exercise: Exercise, impl: str) -> Source:
    """Where the program is; ValueError if it is blank."""
    source = find_source(impl, exercise.phase)
    path = source.path(exercise.file)
    if blank_lines(path, exercise.id):
        raise ValueError(f"exercise {exercise.id} is blank in {short(path)}: write it first")
    return source


def graded(scene: Scene, seed: int, given: Mapping[str, float], impl: str) -> list[Outcome]:
    """Run the program, and compare. ValueError with the learner's line if the run fails."""
    exercise = load_course().exercise(scene.exercise)
    source = runnable(exercise, impl)
    passes = {*progress.known_passes(exercise.phase.exercises), exercise.id}
    others = [each for each in exercise.phase.exercises if each.id not in passes]
    replaced = others if impl == "templates" and has_solutions() else []
    protect_this_process()
    case = scene.case(seed)
    seen = scene.seen(case, Implementation(source, exercise.file, replaced), source.files())
    try:
        return [
            Outcome(
                lab=f"P{scene.exercise}",
                name=quantity.name,
                asks=quantity.asks,
                unit=quantity.unit,
                predicted=given[quantity.name],
                formula=quantity.formula,
                value=float(quantity.value(case)),
                tolerance=quantity.tolerance,
                why=quantity.why,
                answers={who: float(of(seen)) for who, of in quantity.answers.items()},
                timed=quantity.unit in TIMED,
            )
            for quantity in scene.quantities
        ]
    except RankFailure as failure:
        where = f"\n  line: {failure.line}" if failure.line else ""
        raise ValueError(f"the run of {exercise.id} failed: {failure.message}{where}") from None


def answered(question: Question, given: float) -> Outcome:
    """A whole-run question: its answer is computed now."""
    return Outcome(
        lab=f"P{question.id}",
        name="answer",
        asks=question.text,
        unit=question.unit,
        predicted=given,
        formula=ANSWERS[question.by].formula,
        value=question.answer(),
        tolerance=question.tolerance,
        why=ANSWERS[question.by].why,
        timed=question.by in TIMED_ANSWERS,
    )
