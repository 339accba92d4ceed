"""A prediction by its lab's id: what it is about, and a file to fill in before anything runs."""

from __future__ import annotations

from .answers import sheet
from .catalogue import SCENES
from .machines import Question, questions
from .scene import Scene
from .screen import asked_of, title_of


def subject_of(lab_id: str) -> Scene | Question:
    """The scene of the lab's exercise, or its question about whole runs; ValueError without one."""
    known = questions() if lab_id.startswith("PM") else SCENES
    found: Scene | Question | None = known.get(lab_id[1:])
    if found is None:
        raise ValueError(f"there is no prediction {lab_id}")
    return found


def sheet_of(lab_id: str, seed: int) -> str:
    """A file to fill in; of a scene with the sizes that the seed draws."""
    subject = subject_of(lab_id)
    if isinstance(subject, Question):
        title = f"{lab_id}: {subject.text}"
    else:
        title = title_of(subject, subject.case(seed), seed)
    return sheet(title, asked_of(subject))
