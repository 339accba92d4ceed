"""What each recorded verdict rests on, as one hash: of files, of facts in the map, of settings.

A verdict is that of one test file on one subject, an exercise or a notebook: all its tests on the
subject pass. A file of checks is a test file, too: of the exercise's solution. Of other files with
a mark (simulations, and training that has to equal one process) the subject is the file itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path

from distlab.course.catalogue import Course, Exercise, check_files, features_for, load_course
from distlab.grading.wrong import Mutant, all_mutants
from distlab.host.toml import tomllib
from tests.verdicts.sources import Sources

MUTANTS = "tests/mutants/test_mutants.py"
MESSAGES = "tests/mutants/test_messages.py"
CHANGES = "tests/mutants/test_table.py"
ALTERNATIVES = "tests/alternatives/test_alternatives.py"
NOTEBOOKS = "tests/notebooks/test_notebooks.py"
WITH_SUBJECTS = (MUTANTS, MESSAGES, CHANGES, ALTERNATIVES, NOTEBOOKS)
_MARK = re.compile(r"^(@|pytestmark = )pytest\.mark\.verdict$", re.M)
_IMPORT = re.compile(r"^ *(?:from|import) (\w+)", re.M)


@dataclass(frozen=True)
class Verdict:
    """The verdict of a test file on a subject. ``facts`` are those that stand in no file of their
    own."""

    file: str
    subject: str
    paths: frozenset[Path]
    facts: str

    @property
    def key(self) -> tuple[str, str]:
        """Its place in the record."""
        return self.file, self.subject

    def digest(self, sources: Sources) -> str:
        """The hash of all that it rests on."""
        files = sorted(map(sources.entry, self.paths))
        return hashlib.sha256(json.dumps([self.facts, files]).encode()).hexdigest()[:16]


def verdicts(sources: Sources) -> Iterator[Verdict]:
    """All verdicts that the record stands for."""
    yield from _of_exercises(sources)
    yield from _of_notebooks(sources)
    yield from _of_files(sources)


def marked_files(root: Path) -> list[Path]:
    """The test files in which tests have the mark."""
    every = sorted((root / "tests").rglob("test_*.py"))
    return [path for path in every if _MARK.search(path.read_text(encoding="utf-8"))]


def _of_exercises(sources: Sources) -> Iterator[Verdict]:
    root = sources.root
    course, settings = load_course(root), pytest_settings(root)
    mutants, others = defaultdict[str, list[Mutant]](list), alternatives(root)
    for mutant in all_mutants(root / "tests" / "mutants"):
        mutants[mutant.exercise].append(mutant)
    for exercise in course.exercises:
        if not exercise.phase.ready:
            continue
        base = _files(exercise, course)
        map_ = json.dumps([settings, _entry(exercise), list(map(astuple, features_for(exercise)))])
        name = f"phase{exercise.phase.number}"
        contract = root / "tests" / name / "contract" / f"{exercise.file}.toml"
        table = root / "tests" / "mutants" / "table" / f"{name}_{exercise.file}.toml"
        own = mutants[exercise.id]
        checks = sources.rests_on(base)
        for path in check_files(exercise):
            yield Verdict(path.relative_to(root).as_posix(), exercise.id, checks, map_)
        for file, extra, words, facts in (
            (MUTANTS, (), _words(own), repr(own)),
            (MESSAGES, (contract,), (), ""),
            (CHANGES, (table,), (), ""),
            (ALTERNATIVES, others[exercise.id], (), ""),
        ):
            begin = [root / file, *base, *(path for path in extra if path.is_file())]
            found = sources.rests_on(begin, words)
            yield Verdict(file, exercise.id, found, map_ + facts)


def _of_notebooks(sources: Sources) -> Iterator[Verdict]:
    """A notebook may load any exercise by its name. It runs on more packages than torch."""
    root = sources.root
    map_ = [_entry(exercise) for exercise in load_course(root).exercises]
    loaded = [*root.glob("solutions/*/*.py"), *root.glob("phase*/template_*.py")]
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        begin = [root / NOTEBOOKS, path.with_suffix(".py"), root / "tests" / "conftest.py"]
        facts = json.dumps([pytest_settings(root), map_, _versions(begin)])
        found = sources.rests_on([*begin, path, *loaded])
        yield Verdict(NOTEBOOKS, path.stem, found, facts)


def _of_files(sources: Sources) -> Iterator[Verdict]:
    """They may run any solution, and any command, by a name that is put together."""
    root = sources.root
    map_ = [_entry(exercise) for exercise in load_course(root).exercises]
    folders = ("distlab/**", "given", "solutions/*", "phase*")
    programs = [path for folder in folders for path in sorted(root.glob(f"{folder}/*.py"))]
    facts = json.dumps([pytest_settings(root), map_, _versions(programs)])
    for path in marked_files(root):
        name = path.relative_to(root).as_posix()
        if name not in WITH_SUBJECTS:
            found = sources.rests_on([path, root / "tests" / "conftest.py", *programs])
            yield Verdict(name, path.stem, found, facts)


def _versions(programs: Iterable[Path]) -> list[str]:
    """Of the packages that these programs import."""
    texts = (each.read_text(encoding="utf-8") for each in programs)
    return sorted(map(_version, {name for text in texts for name in _IMPORT.findall(text)}))


@functools.cache
def _version(package: str) -> str:
    """Of an installed package; empty for parts of Python and of the course."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{package} {metadata.version(package)}"
    return ""


def alternatives(root: Path) -> dict[str, list[Path]]:
    """The files of the folders with an alternative, by exercise."""
    found = defaultdict[str, list[Path]](list)
    for path in sorted((root / "tests" / "alternatives").glob("*/*.py")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        for exercise in first.partition("for: ")[2].split(", "):
            found[exercise] += sorted(path.parent.glob("*.py"))
    return found


def pytest_settings(root: Path) -> str:
    """How pytest is set up, for checks as well."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return json.dumps(data["tool"]["pytest"], sort_keys=True)


def _files(exercise: Exercise, course: Course) -> list[Path]:
    """What every verdict on an exercise begins with."""
    checks = check_files(exercise)
    set_up = {parent / "conftest.py" for path in checks for parent in path.parents}
    used = [course.exercise(name).solution_path for name in exercise.uses]
    here = [path for path in set_up if path.is_relative_to(exercise.folder) and path.is_file()]
    return [*checks, *here, exercise.solution_path, *used]


def _entry(exercise: Exercise) -> list[object]:
    """The exercise in the map, without estimates and hints."""
    phase = exercise.phase
    own = [exercise.id, exercise.title, exercise.file, exercise.points]
    return [*own, exercise.uses, exercise.requires, phase.number, phase.folder]


def _words(mutants: Iterable[Mutant]) -> set[str]:
    """Names in the texts of wrong implementations: they may import what the solution does not."""
    texts = [new for m in mutants for new in (m.becomes, *(new for _, new in m.more))]
    return {word for text in texts if "import" in text for word in re.findall(r"[\w.]+", text)}
