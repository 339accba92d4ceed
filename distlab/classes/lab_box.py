"""Tests that a student wrote, graded in a box: they run beside right and wrong implementations.

The box holds the course with its answers, and nothing else of this machine: no other submission, no
results, no network. The tests judge solutions, so the solutions must be there to be run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..course.catalogue import load_course, root
from ..labs.frame import Part
from ..labs.written.command import chosen, grade, lab_of, parts_of
from ..labs.written.jury import jury
from ..sandbox import Limits
from ..sandbox.filter import open_filter
from ..sandbox.limits import become, nobody
from ..sandbox.walls import command

ANSWERS = ("solutions", "tests", "labs", "references", "configs", "pyproject.toml")
INSIDE = Path("/handed-in")
LIMIT = 600.0  # seconds: it ends what hangs


def graded(exercise: str, file: Path, seed: int, limits: Limits | None) -> list[Part]:
    """What the tests earn. ``limits``: of the box; without any they run with this one's rights.

    ValueError with one line if they can't be used, or if nothing comes back.
    """
    if limits is not None and limits.container:
        raise ValueError(
            "tests that students write need a sandbox with namespaces: grade the class with "
            "`distlab class grade` on a machine that has them"
        )
    path = file if limits is None else INSIDE / file.name
    task = {"exercise": exercise, "file": str(path), "seed": seed}
    task |= {"user": limits and nobody(), "limits": limits and vars(limits)}
    program = [sys.executable, "-m", __name__, json.dumps(task)]
    text = _outside(program, root()) if limits is None else _boxed(program, file, limits)
    try:
        answer = json.loads(text.splitlines()[-1])
        if "problem" in answer:
            raise ValueError(answer["problem"])
        return [Part(**part) for part in answer["parts"]]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{file.name}: its grading ended without a result") from None


def _outside(program: Sequence[str], folder: Path) -> str:
    return _said(program, cwd=folder)


def _boxed(program: Sequence[str], file: Path, limits: Limits) -> str:
    own = root()
    shown = [(own / name, own / name) for name in ANSWERS if (own / name).exists()]
    shown += [(phase, phase) for phase in {e.template_path.parent for e in load_course().exercises}]
    filter_fd = open_filter()
    walls = command(own, [*shown, (file, INSIDE / file.name)], [], limits, filter_fd)
    try:
        return _said([*walls, *program], pass_fds=[] if filter_fd is None else [filter_fd], env={})
    finally:
        if filter_fd is not None:
            os.close(filter_fd)


def _said(program: Sequence[str], **options: Any) -> str:
    """What the program prints to its standard output."""
    try:
        done = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, **options
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the tests took more than {LIMIT:g} s") from None
    return str(done.stdout.decode(errors="replace"))


def main(text: str) -> None:
    """Inside: grade, and print the parts as JSON."""
    task = json.loads(text)
    if task["limits"] is not None:
        if task["user"] is not None:
            become(task["user"])
        Limits(**task["limits"]).hold()
    sys.path.insert(0, str(root()))
    exercise = load_course().exercise(task["exercise"])
    try:
        with jury(exercise, [Path(task["file"])]) as by:
            outcome = grade(by, chosen()[exercise.id], task["seed"])
        answer: dict[str, Any] = {
            "parts": [asdict(part) for part in parts_of(outcome, lab_of(exercise).points)]
        }
    except ValueError as error:
        answer = {"problem": " ".join(str(error).split())}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
