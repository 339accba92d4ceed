"""Make a class: submissions out of solutions, alternatives, templates and wrong implementations.

    python -m scripts.made_class OUT --students 60 --phases 1 --seed 7

writes ``OUT/submissions`` (folders, zips, tars and git repositories), ``OUT/class.toml`` (rules)
and ``OUT/made.json``: the parts of each submission, so that a grading can be compared with them.
The same seed gives the same class. Most students hand in before the due date; some are late.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distlab.course.catalogue import Exercise, Phase, load_course
from distlab.grading.wrong import Mutant, all_mutants

from .made_files import alternatives_for, copied, file_of
from .made_shapes import SHAPES, Version, write_entry

KINDS = {"right": 20, "alternative": 15, "wrong": 40, "begun": 12, "blank": 8, "copy": 5}
DUE = datetime.datetime(2026, 3, 16, 20, 0, tzinfo=datetime.timezone.utc)
RULES = """# Rules of a made class.
[class]
name = "A made class"
time_zone = "UTC"

[dates]
due = 2026-03-16 20:00:00

[late]
grace_minutes = 15
percent_per_day = 10
cut_off_days = 5

[exercises]
only = [{only}]
"""


@dataclass
class Made:
    """The parts of a submission. ``wrong``: ids of wrong implementations in it. ``blank``:
    exercises not begun. ``files``: the final files by their path."""

    student: str
    kind: str
    shape: str
    submitted: str
    entry: str = ""
    wrong: list[str] = field(default_factory=list)
    alternatives: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    copied_from: str = ""


def made_class(
    out: Path,
    count: int,
    seed: int = 0,
    phases: Sequence[int] = (1,),
    exercises: Sequence[str] = (),
    shapes: Sequence[str] = SHAPES,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Made]:
    """Write the class into ``out``; ``exercises``: only their files are handed in."""
    rng = random.Random(seed)
    course = load_course()
    chosen = [
        e
        for number in phases
        for e in course.phase(number).exercises
        if not exercises or e.file in {course.exercise(i).file for i in exercises}
    ]
    common = _common(chosen, rng)
    folder = out / "submissions"
    folder.mkdir(parents=True)
    class_: list[Made] = []
    works: list[list[Version]] = []
    for number in range(1, count + 1):
        kind = rng.choices(kinds, [KINDS[k] for k in kinds])[0]
        kind = "wrong" if kind == "copy" and not class_ else kind
        when = DUE + datetime.timedelta(hours=rng.triangular(-90, 30, -3))
        made = Made(
            f"student-{number:02}", kind, rng.choice(shapes), when.isoformat("T", "seconds")
        )
        if kind == "copy":
            other = rng.randrange(len(class_))
            made.copied_from = class_[other].student
            made.wrong, made.blank = class_[other].wrong, class_[other].blank
            versions = [Version(when, copied(works[other][-1].files))]
        else:
            versions = _work(made, chosen, common, when, rng)
        made.entry = write_entry(folder, made.student, made.shape, versions, rng)
        class_.append(made)
        works.append(versions)
    only = ", ".join(f'"{e.id}"' for e in chosen)
    (out / "class.toml").write_text(RULES.format(only=only), encoding="utf-8")
    (out / "made.json").write_text(json.dumps([asdict(m) for m in class_], indent=1) + "\n")
    return class_


def _common(exercises: list[Exercise], rng: random.Random) -> dict[str, list[tuple[Mutant, float]]]:
    """Wrong implementations per exercise; a few of them are far more common than others."""
    every = all_mutants()
    found: dict[str, list[tuple[Mutant, float]]] = {}
    for exercise in exercises:
        mutants = [m for m in every if m.exercise == exercise.id and not m.tier]
        rng.shuffle(mutants)
        found[exercise.id] = [(m, 1 / (position + 1) ** 2) for position, m in enumerate(mutants)]
    return found


def _work(
    made: Made,
    exercises: list[Exercise],
    common: dict[str, list[tuple[Mutant, float]]],
    when: datetime.datetime,
    rng: random.Random,
) -> list[Version]:
    """The history of a student's files: the last version is the submission."""
    mutants: list[Mutant] = []
    if made.kind in ("wrong", "begun"):
        sure = rng.choice(exercises)
        for exercise in exercises:
            if common[exercise.id] and (exercise is sure or rng.random() < 0.25):
                each, weights = zip(*common[exercise.id], strict=True)
                mutants += rng.choices(each, weights)
    done = len(exercises)
    if made.kind in ("begun", "blank"):
        done = rng.randrange(1, len(exercises)) if made.kind == "begun" else 0
    solved = {e.id for e in exercises[:done]}
    mutants = [m for m in mutants if m.exercise in solved]
    made.blank = [e.id for e in exercises[done:]]
    steps = sorted({done, *(rng.randrange(done + 1) for _ in range(3))})
    versions = []
    for position, step in enumerate(steps):
        now = {e.id for e in exercises[:step]}
        last = position == len(steps) - 1
        ago = datetime.timedelta(hours=26 * (len(steps) - 1 - position))
        versions.append(Version(when - ago, _files(made, exercises, now, mutants, last)))
    if made.kind == "alternative":
        taken = alternatives_for(exercises, rng)
        made.alternatives = [path.parent.name for path in taken.values()]
        for (phase, name), path in taken.items():
            text = file_of(_phase(phase), name, solved, [], path)[0]
            versions[-1].files[f"{_phase(phase).folder}/template_{name}.py"] = text
    return versions


def _phase(number: int) -> Phase:
    return load_course().phase(number)


def _files(
    made: Made, exercises: list[Exercise], solved: set[str], mutants: list[Mutant], last: bool
) -> dict[str, str]:
    files = {}
    for phase, name in dict.fromkeys((e.phase.number, e.file) for e in exercises):
        text, used = file_of(_phase(phase), name, solved, mutants)
        files[f"{_phase(phase).folder}/template_{name}.py"] = text
        made.wrong += used if last else []
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """The command behind ``python -m scripts.made_class``."""
    parser = argparse.ArgumentParser(prog="scripts.made_class", description=__doc__)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--students", type=int, default=60)
    parser.add_argument("--phases", type=int, nargs="+", default=[1])
    parser.add_argument("--exercises", nargs="+", default=[], help="only the files of these")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.out.exists():
        parser.error(f"{options.out} exists")
    class_ = made_class(
        options.out, options.students, options.seed, options.phases, options.exercises
    )
    for kind in KINDS:
        print(f"{kind}: {sum(m.kind == kind for m in class_)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
