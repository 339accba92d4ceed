"""Gradescope's autograder: the zip to upload, and what it does with a submission.

The container is the sandbox there. Root grades, holds checks and solutions, and writes the result.
Learner code runs as another user that can read none of these files (``sandbox/container.py``).
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from ..host import zips
from ..sandbox import container
from .config import ClassConfig, clean_id, load_class
from .engine import grade_class
from .graders import ClassGrader
from .gradescope import BROKEN, NO_RESULT, no_result, results
from .results import write
from .submissions import Entry

PROGRAMS = ("setup.sh", "run_autograder")
RULES = "class.toml"
COURSE = (
    *("course.toml", "pyproject.toml", "README.md", "launch_training.sh", "scripts/environment.py"),
    *("distlab", "given", "solutions", "clusters", "configs", "references"),
    *("tests/*.py", "tests/at_exit", "tests/phase*"),
)


# -- the zip --------------------------------------------------------------------------------------
def pack(to: Path, rules: Path | None) -> ClassConfig:
    """Write the autograder's zip, with the rules of a class; ValueError if they can't be read."""
    config = load_class(rules)
    if config.labs:
        raise ValueError(
            "[labs] points: Gradescope grades exercises alone; `distlab class grade` grades labs"
        )
    programs = root() / "classroom" / "gradescope"
    files = {name: (programs / name).read_bytes() for name in PROGRAMS}
    files |= {f"course/{name}": content for name, content in _course()}
    if rules is not None:
        files[RULES] = rules.read_bytes()
    zips.write(to, files, PROGRAMS)
    return config


def _course() -> Iterator[tuple[str, bytes]]:
    """The files of the course that grading needs, by name."""
    for pattern in COURSE:
        for path in sorted(root().glob(pattern)):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                name = file.relative_to(root()).as_posix()
                if file.is_file() and "__pycache__" not in name:
                    yield name, file.read_bytes()


# -- a submission ---------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> int:
    """Grade ``submission/`` of the folder named, and write ``results/results.json`` there."""
    base = Path(arguments[0]).resolve()
    os.umask(0o077)  # only root reads the files that are written here
    _close(base)
    result = base / "results" / "results.json"
    write(result, _dumped(no_result(NO_RESULT)))  # stays there if this process is killed
    try:
        found = _graded(base)
    except Exception:
        traceback.print_exc()
        found = no_result(BROKEN)
    write(result, _dumped(found))
    return 0


def _close(base: Path) -> None:
    """Results, submission and facts about the student belong to root alone."""
    (base / "results").mkdir(exist_ok=True)
    for name in ("results", "submission", "submission_metadata.json"):
        path = base / name
        if path.exists():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _graded(base: Path) -> dict[str, Any]:
    why = container.obstacle(root())
    if why:
        raise OSError(f"learner code can't be kept from the answers here: {why}")
    rules = root().parent / RULES
    config = load_class(rules if rules.is_file() else None)
    student, submitted = _whose(base / "submission_metadata.json")
    work = Path(tempfile.mkdtemp(prefix="grading-", dir=root().parent))
    try:
        entry = Entry(student, base / "submission", submitted, "submission")
        grader = ClassGrader(container=True)
        grade_class(config, [entry], work, jobs=1, grader=grader, way="container")
        found = json.loads((work / "students" / student / "result.json").read_text("utf-8"))
        return results(found, config)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _whose(path: Path) -> tuple[str, datetime.datetime | None]:
    """The student and the time of the submission, from Gradescope's file. A
    trial run has no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = [str(user["email"]) for user in data["users"]]
        when = datetime.datetime.fromisoformat(data["created_at"].replace("Z", "+00:00"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "student", None
    return clean_id("+".join(sorted(names)) or "student"), when


def _dumped(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
