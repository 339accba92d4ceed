"""Write ``labs/index.json``, the list of all labs: ``python -m scripts.lab_index --write``.

Without ``--write`` it says whether the list is in step with what makes the labs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from distlab.course.catalogue import load_course
from distlab.labs.debug.chosen import all_labs
from distlab.labs.frame import Lab
from distlab.labs.index import Listed, as_text, index_file
from distlab.labs.predict.catalogue import SCENES
from distlab.labs.predict.machines import questions
from distlab.labs.review.chosen import all_reviews
from distlab.labs.written.command import chosen, lab_of


def found() -> Iterator[Listed]:
    """All labs, kind by kind."""
    course = load_course()
    yield from map(_listed, all_labs())
    wanted = chosen()
    yield from (_listed(lab_of(e)) for e in course.exercises if e.id in wanted)
    yield from map(_listed, all_reviews())
    for exercise in course.exercises:
        if exercise.id in SCENES:
            yield Listed(
                id=f"P{exercise.id}",
                kind="predict",
                phase=exercise.phase.number,
                exercise=exercise.id,
                level=1,
                title=f"Predict: {exercise.title}",
                points=len(SCENES[exercise.id].quantities),
            )
    for question in questions().values():
        yield Listed(
            id=f"P{question.id}",
            kind="predict",
            phase=0,
            exercise="",
            level=1,
            title=question.text,
            points=1,
        )


def _listed(lab: Lab) -> Listed:
    phase = load_course().exercise(lab.exercise).phase.number
    fields = {name: getattr(lab, name) for name in ("id", "kind", "exercise", "level", "title")}
    return Listed(**fields, phase=phase, points=lab.points)


def main(arguments: list[str]) -> int:
    """0 if the list is in step."""
    text, path = as_text(found()), index_file()
    if arguments == ["--write"]:
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is not in step: python -m scripts.lab_index --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
