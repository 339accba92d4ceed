"""A small class, graded by the course's own checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distlab.classes.config import load_class
from distlab.classes.engine import grade_class
from distlab.classes.graders import ClassGrader
from distlab.classes.results import Attempt
from distlab.classes.submissions import find_entries
from distlab.course.catalogue import load_course
from distlab.sandbox import obstacle
from scripts.made_files import file_of

FILE = "phase1_data_parallel/template_data_loader.py"
RULES = '[class]\nname = "real"\n[exercises]\nonly = ["1.1"]\n'


def class_of(home: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = home / "in" / name / FILE
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    (home / "class.toml").write_text(RULES)


def text_of(*solved: str) -> str:
    return file_of(load_course().phase(1), "data_loader", solved, [])[0]


def graded(home: Path, walls: bool) -> dict[str, Attempt]:
    config = load_class(home / "class.toml")
    entries = find_entries(home / "in", config)
    return grade_class(config, entries, home / "out", jobs=1, grader=ClassGrader(walls))


def verdicts(final: dict[str, Attempt]) -> dict[str, tuple[float, str]]:
    return {n: (a.score, a.found.reports[0].exercises[0].verdict) for n, a in final.items()}


def test_a_class_gets_its_points_twice(tmp_path: Path) -> None:
    """The solution, the template, a file in another encoding and one that is no Python."""
    odd = "# -*- coding: latin-1 -*-\n# M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller\n"
    files = {
        "right": text_of("1.1").replace("\n", "\r\n").encode("utf-8-sig"),
        "blank": text_of().encode(),
        "odd": odd.encode("latin-1") + text_of("1.1").encode("latin-1", "replace"),
        "broken": b"x = 1\0",
    }
    class_of(tmp_path, files)
    assert verdicts(graded(tmp_path, walls=False)) == {
        "right": (10, "pass"),
        "blank": (0, "blank"),
        "odd": (10, "pass"),
        "broken": (0, "error"),
    }
    students = tmp_path / "out" / "students"
    told = {name: (students / name / "feedback.md").read_text() for name in files}
    assert f"next: write exercise 1.1 (Sharded sampler) in {FILE}" in told["blank"]
    assert str(tmp_path) not in "".join(told.values())
    result = json.loads((students / "right" / "result.json").read_text())
    assert (result["phases"][0]["seed"], result["score"], result["max_score"]) == (1, 10, 10)
    table = (tmp_path / "out" / "grades.csv").read_bytes()
    for path in students.glob("b*/gradings/*"):
        path.unlink()  # as if the run had been interrupted
    assert verdicts(graded(tmp_path, walls=False))["blank"] == (0, "blank")
    assert (tmp_path / "out" / "grades.csv").read_bytes() == table


@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there is a sandbox")
def test_a_class_in_a_sandbox(tmp_path: Path) -> None:
    class_of(tmp_path, {"right": text_of("1.1").encode(), "blank": text_of().encode()})
    final = graded(tmp_path, walls=True)
    assert verdicts(final) == {"right": (10, "pass"), "blank": (0, "blank")}
