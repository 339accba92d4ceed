"""What a prediction asks for, before anything runs: for a sheet to fill in."""

from __future__ import annotations

from ...course.catalogue import load_course
from .answers import sheet
from .catalogue import SCENES, situation
from .machines import Question, questions
from .scene import Scene

Asked = list[tuple[str, str, str]]  # name, question, unit


def question_of(lab_id: str) -> Question | None:
    """The question about whole runs that the lab is; None if it is about an exercise."""
    return questions().get(lab_id[1:]) if lab_id.startswith("PM") else None


def scene_of(lab_id: str) -> Scene | None:
    """The scene of the lab's exercise; None if it is about whole runs."""
    return SCENES.get(lab_id[1:])


def asked_of(lab_id: str) -> Asked:
    """The numbers that the lab asks for."""
    question, scene = question_of(lab_id), scene_of(lab_id)
    if question is not None:
        return [("answer", "answer", question.unit)]
    return [(q.name, q.asks, q.unit) for q in scene.quantities] if scene is not None else []


def sheet_of(lab_id: str, seed: int) -> str:
    """A file to fill in; of a scene with the sizes that the seed draws."""
    question, scene = question_of(lab_id), scene_of(lab_id)
    if question is not None:
        return sheet(f"{lab_id}: {question.text}", asked_of(lab_id))
    if scene is None:
        raise ValueError(f"there is no prediction {lab_id}")
    case = scene.case(seed)
    title = f"{lab_id} {load_course().exercise(scene.exercise).title}, seed {seed}"
    where = f"{situation(scene, case)}\nMachine: {case.described}."
    return sheet(f"{title}\n{where}", asked_of(lab_id))
