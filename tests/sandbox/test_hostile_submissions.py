"""Files of a submission that the grader itself looks at, and texts that reach its reports."""

from __future__ import annotations

import contextlib
import io
import os
import resource
from pathlib import Path

import pytest
from attacks import quiet
from court import RIGHT, Court

from distlab.course.catalogue import load_course, root
from distlab.grading.obstacles import in_the_file
from distlab.grading.implementation import Source
from distlab.grading.report import print_report
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.grading.warm import WarmGrader
from distlab.host.terminal import console
from distlab.sandbox import Limits, Sandbox, obstacle

EXERCISE = load_course().exercise("1.4")


def bomb(levels: int) -> str:
    """Text whose code doubles with each level: what stands in ``finally`` is compiled twice."""
    lines = ["def average_gradients():"]
    for level in range(1, levels):
        lines += ["    " * level + "try: pass", "    " * level + "finally:"]
    return "\n".join([*lines, "    " * levels + "pass", "raise NotImplementedError('none')"])


def test_a_file_that_compiles_to_gigabytes(tmp_path: Path) -> None:
    """The grader's process reads the text of a submission, and makes no code of it."""
    (tmp_path / "trainer.py").write_text(bomb(13))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    in_the_file(Source("impl", tmp_path), EXERCISE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def hostile_file(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "giant":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to({"device": "/dev/zero", "answer": EXERCISE.solution_path}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "giant", "device", "answer"])
def test_files_that_are_no_text(kind: str, tmp_path: Path) -> None:
    """One line says which file is not accepted; nothing waits, and nothing is read."""
    hostile_file(kind, tmp_path / "trainer.py")
    with pytest.raises(ValueError, match=r"trainer\.py") as refused, Sandbox(root(), tmp_path):
        pass
    assert "\n" not in str(refused.value)
