"""A verdict in one file: the learner's work, the seed, the report, and where it was graded.

A person who opens it grades the same files with the same seed, and sees whether the verdict is the
same. It holds no answer, no path of the learner's machine and no name of its user.
"""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..course.catalogue import Exercise, check_files, load_course, root
from ..course.version import course_version
from ..grading.report import print_report
from ..grading.session import Request
from ..grading.sources import find_source
from ..grading.verdicts import Report
from ..host import zips
from ..host.system import cores
from ..host.terminal import console

SCHEMA = 1
MOST = 20 << 20  # bytes of all files in a bundle
LEARNERS = re.compile(r"[\w-]+/[\w-]+\.py")
FACTS = ("course_version", "checks", "torch", "python", "system", "cores")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: which exercise was graded and how, the verdict, and the learner's files."""

    manifest: dict[str, Any]
    report: dict[str, Any]
    files: dict[str, bytes]

    @property
    def exercise(self) -> Exercise:
        """The bundle's exercise; ValueError if this course has none with its number."""
        return load_course().exercise(str(self.manifest["exercise"]))

    def request(self, folder: Path) -> Request:
        """The same grading, for the files unpacked in ``folder``."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        asked = self.manifest["request"]
        return request(
            self.exercise, str(folder), int(asked["seed"]), partial=bool(asked["partial"])
        )


def request(exercise: Exercise, impl: str, seed: int | None, *, partial: bool) -> Request:
    """The grading of one exercise. Other phases count as passed: a bundle
    has none of their files."""
    others = [e.id for e in load_course().exercises if e.phase.number != exercise.phase.number]
    return Request(
        impl=impl,
        device="cpu",
        seed=seed,
        exercises=(exercise.id,),
        known=frozenset(others),
        partial=partial,
    )


def facts(exercise: Exercise) -> dict[str, Any]:
    """Facts about the machine and the versions that may change a verdict."""
    digest = hashlib.sha256()
    for path in check_files(exercise):
        digest.update(path.read_bytes())
    return {
        "course_version": course_version(),
        "checks": f"sha256:{digest.hexdigest()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
    }


# -- packing --------------------------------------------------------------------------------------
def pack(
    exercise: Exercise, asked: Request, report: Report, files: dict[str, bytes], to: Path
) -> None:
    """Write the bundle of a graded exercise and of the learner's ``files``."""
    result = next(e for e in report.exercises if e.id == exercise.id)
    shown = io.StringIO()
    print_report(report, exercise.phase, console(file=shown))
    manifest = {
        "schema": SCHEMA,
        "exercise": exercise.id,
        "verdict": result.verdict,
        "points": result.points,
        "request": {"seed": report.seed, "partial": asked.partial},
        "facts": facts(exercise),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    plain = _Nameless(asked.impl)
    parts = {
        "manifest.json": _dumped(manifest),
        "report.json": _dumped(plain.value(report.as_json())),
        "report.txt": plain.text(shown.getvalue()).encode(),
    }
    zips.write(to, files | parts)


def work(exercise: Exercise, impl: str) -> dict[str, bytes]:
    """The learner's files of the phase, by their names in the course; ValueError for solutions."""
    source = find_source(impl, exercise.phase)
    answers = root() / "solutions"
    found = {}
    for path in map(Path, source.files()):
        if path.resolve().is_relative_to(answers):
            raise ValueError(
                f"{path.name} is the course's solution: a bundle holds a learner's work"
            )
        found[f"{exercise.phase.folder}/{path.name}"] = path.read_bytes()
    return found


class _Nameless:
    """Takes folders and user names out of texts."""

    def __init__(self, impl: str) -> None:
        folders = {os.path.realpath(tempfile.gettempdir()): "<tmp>", tempfile.gettempdir(): "<tmp>"}
        folders |= {sys.base_prefix: "<python>", sys.prefix: "<python>"}
        folders |= {str(Path.home()): "~", str(root()): "<course>"}
        if os.path.isdir(impl):
            folders |= {str(Path(impl).resolve()): "<work>", os.path.abspath(impl): "<work>"}
        usable = [name for name in folders if len(name) > 1]
        longest = "|".join(map(re.escape, sorted(usable, key=len, reverse=True)))
        self._folders = folders
        self._place = re.compile(rf"(?:{longest})(?![\w.-])")
        self._user = re.compile(
            rf"(?<=/){re.escape(_user())}(?![\w.-])|\b{re.escape(_user())}(?=@)"
        )

    def text(self, text: str) -> str:
        """The text without folders and user names."""
        found = self._place.sub(lambda match: self._folders[match[0]], text)
        return self._user.sub("<user>", found)

    def value(self, value: Any) -> Any:
        """Plain data whose texts are all without them."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {key: self.value(each) for key, each in value.items()}
        return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user need not have a name
        return "nobody"


def _dumped(data: Any) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


# -- opening --------------------------------------------------------------------------------------
def opened(path: Path) -> Bundle:
    """The contents of a bundle; ValueError with the reason if the file is none, or was changed."""
    inside = zips.read(path, MOST)
    try:
        manifest, report = (json.loads(inside[f"{name}.json"]) for name in ("manifest", "report"))
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"its schema is {manifest['schema']}, and this course reads {SCHEMA}")
        known = {"manifest.json", "report.json", "report.txt", *manifest["files"]}
        odd = [name for name in inside if name not in known]
        odd += [name for name in manifest["files"] if not LEARNERS.fullmatch(name)]
        if odd:
            raise ValueError(f"{odd[0]!r} does not belong into a bundle")
        for name, digest in manifest["files"].items():
            if hashlib.sha256(inside[name]).hexdigest() != digest:
                raise ValueError(f"{name} was changed after it was packed")
        files = {name: inside[name] for name in manifest["files"]}
        found = Bundle(manifest=manifest, report=report, files=files)
        _ = found.manifest["request"]["seed"], verdicts_of(report), manifest["facts"].items()
    except ValueError as error:
        raise ValueError(f"{path} is no bundle that can be opened: {error}") from None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no bundle: {type(error).__name__} {error}") from None
    return found


def verdicts_of(report: dict[str, Any]) -> dict[str, str]:
    """The verdict of each check, for the bundle's exercise and the exercises that it builds on."""
    return {c["name"]: c["verdict"] for e in report["exercises"] for c in e["checks"]}


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Checks with another verdict here, one line each. A check that one machine
    can't run is no difference."""
    first, second = verdicts_of(there), verdicts_of(here)
    lines = []
    for name in sorted(first.keys() | second.keys()):
        a, b = first.get(name, "absent"), second.get(name, "absent")
        if a != b and "needs" not in (a, b):
            lines.append(f"{name}: {a} there, {b} here")
    return lines


def surroundings(bundle: Bundle) -> list[str]:
    """The facts about this machine that differ, one line each."""
    there, here = bundle.manifest["facts"], facts(bundle.exercise)
    return [f"{k}: {there.get(k)} there, {here[k]} here" for k in FACTS if there.get(k) != here[k]]
