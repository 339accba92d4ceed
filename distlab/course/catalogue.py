"""The map of the course: its exercises, their files, and the exercises that they build on.

Read from ``course.toml``. Imports neither torch nor any exercise, so that the map shows at once.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..host.toml import tomllib
from .regions import functions_in, regions_of
from .tracks import Track, tracks_of

INDEX = "course.index.json"  # stands for the solutions where they are absent


def root() -> Path:
    """The course's folder."""
    return Path(__file__).resolve().parents[2]


def has_solutions(folder: Path | None = None) -> bool:
    """Whether the solutions are here: in a hand-out they are not."""
    return ((folder or root()) / "solutions").is_dir()


def need_solutions(what: str) -> None:
    """Raise ValueError with one line if there are no solutions."""
    if not has_solutions():
        raise ValueError(f"{what} needs the solutions, and this hand-out has none")


@dataclass(frozen=True)
class Phase:
    """One phase: ``ready`` when its exercises exist."""

    number: int
    title: str
    folder: str
    status: str
    exercises: list[Exercise] = field(default_factory=list, compare=False, repr=False)

    @property
    def ready(self) -> bool:
        """Whether the phase can be worked on."""
        return self.status == "ready"


@dataclass(frozen=True)
class Exercise:
    """One exercise. Exercises in ``uses`` are taken from the solution where the learner's
    don't pass; those in ``requires`` must pass first. ``minutes`` of work and ``difficulty`` (1 to
    5) are estimates. ``was_in``: the exercise that it was a part of, if any."""

    id: str
    title: str
    file: str
    points: int
    uses: tuple[str, ...]
    requires: tuple[str, ...]
    hints: tuple[str, ...]
    phase: Phase = field(compare=False, repr=False)
    was_in: str = ""
    minutes: int = 0
    difficulty: int = 0
    folder: Path = field(default_factory=root, compare=False, repr=False)

    @property
    def builds_on(self) -> set[str]:
        """The exercises that come before it."""
        return {*self.uses, *self.requires}

    @property
    def solution_path(self) -> Path:
        """The file with the solution's regions."""
        return self.folder / "solutions" / self.phase.folder / f"{self.file}.py"

    @property
    def template_path(self) -> Path:
        """The file that the learner edits."""
        return self.folder / self.phase.folder / f"template_{self.file}.py"

    @property
    def checks_glob(self) -> str:
        """Pattern, relative to the course's folder, of the check files."""
        return f"tests/phase{self.phase.number}/test_{self.file}*.py"

    @property
    def guidelines_path(self) -> Path:
        """The phase's teaching text; the exercise's section is headed ``## <id>``."""
        return self.folder / self.phase.folder / "guidelines.md"


@dataclass(frozen=True)
class Feature:
    """A feature of PyTorch that does what learners write themselves: their code must not call it.

    ``name``: its name in messages. ``calls``: dotted names of functions and classes. ``only``: the
    exercises that may not call it (all if empty). ``but``: exercises that may.
    """

    name: str
    calls: tuple[str, ...]
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


@dataclass(frozen=True)
class Course:
    """All phases and their exercises, in order.

    ``address``: where the course is published; empty if nobody has said it.
    """

    phases: list[Phase]
    exercises: list[Exercise]
    features: list[Feature] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)
    address: str = ""

    def exercise(self, exercise_id: str) -> Exercise:
        """The exercise called ``exercise_id``; ValueError names the nearest one otherwise."""
        for exercise in self.exercises:
            if exercise.id == exercise_id:
                return exercise
        ids = [e.id for e in self.exercises]
        near = difflib.get_close_matches(exercise_id, ids, n=1, cutoff=0.3)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"no exercise {exercise_id!r}{guess} (there are {ids[0]} to {ids[-1]}; "
            "`distlab` shows the map)"
        )

    def prerequisites(self, ids: Iterable[str]) -> set[str]:
        """All exercises that those in ``ids`` build on."""
        found: set[str] = set()
        todo = list(ids)
        while todo:
            new = self.exercise(todo.pop()).builds_on - found
            found |= new
            todo += new
        return found

    def phase(self, number: int) -> Phase:
        """The phase with this number."""
        for phase in self.phases:
            if phase.number == number:
                return phase
        raise ValueError(f"no phase {number}: there are {[p.number for p in self.phases]}")

    def track(self, name: str) -> Track:
        """The track with this name."""
        for track in self.tracks:
            if track.name == name:
                return track
        names = ", ".join(track.name for track in self.tracks) or "none"
        raise ValueError(f"no track {name!r}: there are {names}")


@functools.cache
def load_course(folder: Path | None = None) -> Course:
    """Read ``course.toml`` of ``folder`` (default: this course); ValueError if it is malformed."""
    base = folder or root()
    try:
        data = tomllib.loads((base / "course.toml").read_text(encoding="utf-8"))
        phases = [Phase(**p) for p in data["phase"]]
        exercises = [_exercise(e, phases, base) for e in data["exercise"]]
        features = [_feature(entry) for entry in data.get("feature", ())]
        tracks = tracks_of(data.get("track", ()), [e.id for e in exercises])
        address = str(data.get("course", {}).get("address", ""))
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"course.toml can't be read: {error}") from None
    for exercise in exercises:
        exercise.phase.exercises.append(exercise)
    return Course(phases, exercises, features, tracks, address)


def _feature(entry: dict[str, Any]) -> Feature:
    lists = {k: tuple(v) for k, v in entry.items() if k != "name"}
    return Feature(entry["name"], **lists)


def _exercise(entry: dict[str, Any], phases: list[Phase], base: Path) -> Exercise:
    number = int(entry["id"].split(".")[0])
    phase = next((p for p in phases if p.number == number), None)
    if phase is None:
        raise KeyError(f"exercise {entry['id']} belongs to no phase")
    lists = {k: tuple(entry[k]) for k in ("uses", "requires", "hints")}
    return Exercise(**(entry | lists), phase=phase, folder=base)


def functions_of(exercise: Exercise) -> list[str]:
    """Qualified names of the functions whose bodies hold the exercise's regions."""
    path = exercise.solution_path
    if not path.is_file():
        return list(_indexed(exercise)["functions"])
    return list(_functions(path, path.stat().st_mtime_ns).get(exercise.id, ()))


def places_of(exercise: Exercise) -> int:
    """How many regions the exercise has: gaps in its file that the learner fills."""
    if not exercise.solution_path.is_file():
        return int(_indexed(exercise)["regions"])
    text = exercise.solution_path.read_text(encoding="utf-8")
    return sum(r.exercise == exercise.id for r in regions_of(text))


def write_index(course: Course, folder: Path) -> Path:
    """Write into ``folder`` what a grader needs to know of the solutions where they are absent:
    names and numbers, no code."""
    entries = {
        e.id: {"functions": functions_of(e), "regions": places_of(e)} for e in course.exercises
    }
    path = folder / INDEX
    path.write_text(json.dumps({"exercises": entries}, indent=1) + "\n", encoding="utf-8")
    return path


def _indexed(exercise: Exercise) -> dict[str, Any]:
    path = exercise.folder / INDEX
    if not path.is_file():
        raise ValueError(f"neither {exercise.solution_path} nor {INDEX} is here")
    found = _entries(path.read_text(encoding="utf-8"))
    if exercise.id not in found:
        raise ValueError(f"{INDEX} has no exercise {exercise.id}")
    return found[exercise.id]


@functools.cache
def _entries(text: str) -> dict[str, dict[str, Any]]:
    return dict(json.loads(text)["exercises"])


@functools.cache
def _functions(solution: Path, changed: int) -> dict[str, list[str]]:
    """``functions_of`` by exercise; cached, because a grader asks for every check. ``changed``: the
    time of the file's last save."""
    text = solution.read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    regions = regions_of(text)
    for name, node in functions_in(ast.parse(text)):
        for number in dict.fromkeys(r.exercise for r in regions if r.within(node)):
            found.setdefault(number, []).append(name)
    return found


def check_files(exercise: Exercise) -> list[Path]:
    """The files with checks of the exercise."""
    marker = re.compile(rf'@exercise\(\s*"{re.escape(exercise.id)}"')
    files = sorted(exercise.folder.glob(exercise.checks_glob))
    return [path for path in files if marker.search(path.read_text(encoding="utf-8"))]


def features_for(exercise: Exercise) -> tuple[Feature, ...]:
    """The features that the exercise's code may not call."""
    return tuple(
        feature
        for feature in load_course().features
        if exercise.id not in feature.but and (not feature.only or exercise.id in feature.only)
    )
