"""Hand-outs: a folder that a learner can work in, without solutions and without later exercises.

Its manifest ``handout.json`` has the course's version and a hash of each file, so that a submission
tells what it was made from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..host import zips
from . import shares, templates
from .catalogue import Course, write_index
from .leaks import leaks
from .version import course_version

MANIFEST = "handout.json"
TOOLKIT = (
    *("distlab/**/*.py", "distlab/commands/*.html"),
    *("given/*.py", "given/profiles/*", "references/*/*.json"),
    *("clusters/*.yaml", "clusters/*/*.yaml", "published/*"),
)
ALONE = ("LICENSE", "pyproject.toml", ".gitignore", "scripts/environment.py")
EDITED = ("phase*/template_*.py", "notebooks/*")  # the learner's own from the first day


def chosen(course: Course, phases: Iterable[int], ids: Iterable[str]) -> Course:
    """The part of the course with these phases, and these exercises beside them.

    ValueError names missing exercises: an exercise comes with all exercises that it builds on.
    """
    wanted = {e.id for number in phases for e in course.phase(number).exercises}
    wanted |= {course.exercise(each).id for each in ids}
    if not wanted:
        raise ValueError("nothing is chosen: name --phases or --exercises")
    needed = course.prerequisites(wanted) - wanted
    lacking = [e.id for e in course.exercises if e.id in needed]
    if lacking:
        raise ValueError(
            "what is chosen builds on other exercises, which learners need as well: add "
            f"--exercises {' '.join(lacking)}"
        )
    exercises = [e for e in course.exercises if e.id in wanted]
    numbers = {e.phase.number for e in exercises}
    of_them = [p for p in course.phases if p.number in numbers]
    return dataclasses.replace(course, phases=of_them, exercises=exercises)


def need_new(*paths: Path) -> None:
    """ValueError unless all of these can be made in the folder of the first one."""
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} is there already: choose another name")
    if not paths[0].parent.is_dir():
        raise ValueError(f"{paths[0]}: the folder {paths[0].parent} does not exist")


def hand_out(course: Course, part: Course, source: Path, target: Path) -> Path:
    """Write ``part`` of the course in ``source`` to the folder ``target`` and to a zip beside it.

    Nothing is left behind if it fails. Returns the zip's path.
    """
    packed = target.with_name(target.name + ".zip")
    need_new(target, packed)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".handout-") as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        _fill(course, part, source, folder)
        found = leaks(course, folder)
        if found:
            raise ValueError(f"{found[0]}: nothing was handed out")
        write_manifest(part, folder)
        made = _zip(folder, Path(temporary) / packed.name)
        folder.rename(target)
        made.rename(packed)
    return packed


def _fill(course: Course, part: Course, source: Path, folder: Path) -> None:
    write_index(part, folder)
    texts = {
        "course.toml": shares.map_of(part, (source / "course.toml").read_text(encoding="utf-8")),
        "Makefile": shares.makefile_of((source / "Makefile").read_text(encoding="utf-8")),
        "README.md": shares.readme_of(part, source, course_version(source)),
    }
    for name, text in shares.templates_of(course, part).items():
        texts[name] = texts[f"{templates.BLANK}/{name}"] = text
    for phase in part.phases:
        name = f"{phase.folder}/guidelines.md"
        text = (source / name).read_text(encoding="utf-8")
        texts[name] = shares.guidelines_of(part, text)
    last = max(phase.number for phase in part.phases)
    for phase in (p for p in course.phases if p.number <= last):  # each builds on those before
        page = f"{phase.folder}/labs.md"
        texts[page] = shares.labs_page_of((source / page).read_text(encoding="utf-8"))
    texts |= shares.checks_of(course, part, source) | shares.notebooks_of(course, part, source)
    texts |= shares.pages_of(texts, source)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for path in (*_copied(part, source), *shares.pictures_of(texts, source)):
        to = folder / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


def _copied(part: Course, source: Path) -> Iterator[Path]:
    """Files that every hand-out has as they are."""
    for pattern in TOOLKIT:
        yield from sorted(source.glob(pattern))
    names = [*ALONE, *(f"test_phase{phase.number}.py" for phase in part.phases)]
    names += [f"{phase.folder}/__init__.py" for phase in part.phases]
    yield from (source / name for name in names if (source / name).is_file())


# -- the manifest ---------------------------------------------------------------------------------
def write_manifest(part: Course, folder: Path) -> None:
    """Write the manifest of a folder that has all of its other files."""
    data = {
        "schema": 1,
        "course_version": course_version(folder),
        "exercises": [e.id for e in part.exercises],
        "files": {_name(path, folder): digest(path) for path in files_in(folder)},
    }
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a hand-out; None if the folder has none that can be read."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {str(k): str(v) for k, v in data["files"].items()}
        return {"course_version": str(data["course_version"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def made_from(folder: Path) -> str | None:
    """The version of the course that a learner's folder was made from, if the folder tells it."""
    found = manifest_of(folder)
    return found["course_version"] if found else None


def changed_in(folder: Path, edited: Collection[str] = EDITED) -> list[str]:
    """Files of the toolkit and the checks that are not as they were handed out, or are gone.

    ``edited``: patterns of files that the learner may edit.
    """
    found = manifest_of(folder)
    if found is None:
        return []
    return [
        name
        for name, known in sorted(found["files"].items())
        if not any(Path(name).match(pattern) for pattern in edited)
        and digest(folder / name) != known
    ]


def digest(path: Path) -> str:
    """The SHA-256 of a file; empty if it is none, or a link."""
    if path.is_symlink() or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_in(folder: Path) -> list[Path]:
    """All files of a folder, in one order everywhere."""
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: _name(p, folder))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _zip(folder: Path, path: Path) -> Path:
    inside = {f"{folder.name}/{_name(each, folder)}": each for each in files_in(folder)}
    programs = [name for name, each in inside.items() if os.access(each, os.X_OK)]
    zips.write(path, {name: each.read_bytes() for name, each in inside.items()}, programs)
    return path
