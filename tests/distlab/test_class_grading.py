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


@pytest.mark.parametrize("walls", [False, True], ids=["unsafe", "sandbox"])
def test_a_class_gets_its_points_twice(tmp_path: Path, walls: bool) -> None:
    """The solution, the template, a file in another encoding and one that is no Python."""
    if walls and obstacle():
        pytest.skip(obstacle())
    phase = load_course().phase(1)
    solved, blank = (file_of(phase, "data_loader", done, [])[0] for done in (["1.1"], []))
    odd = f"# -*- coding: latin-1 -*-\n# M\N{LATIN SMALL LETTER U WITH DIAERESIS}ller\n{solved}"
    files = {
        "right": solved.replace("\n", "\r\n").encode("utf-8-sig"),
        "blank": blank.encode(),
        "odd": odd.encode("latin-1", "replace"),
        "broken": b"x = 1\0",
    }
    for name, data in files.items():
        path = tmp_path / "in" / name / FILE
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    (tmp_path / "class.toml").write_text(RULES)
    config = load_class(tmp_path / "class.toml")

    def graded(out: str) -> dict[str, Attempt]:
        entries = find_entries(tmp_path / "in", config)
        grader = ClassGrader(walls)
        return grade_class(config, entries, tmp_path / out, jobs=2, grader=grader, place="real")

    final = graded("out")
    verdicts = {n: (a.score, a.found.reports[0].exercises[0].verdict) for n, a in final.items()}
    assert verdicts == {
        "right": (10, "pass"),
        "blank": (0, "blank"),
        "odd": (10, "pass"),
        "broken": (0, "error"),
    }
    text = (tmp_path / "out" / "students" / "blank" / "feedback.md").read_text()
    assert f"next: write exercise 1.1 (Sharded sampler) in {FILE}" in text
    assert (
        str(tmp_path) not in (tmp_path / "out" / "students" / "broken" / "feedback.md").read_text()
    )
    result = json.loads((tmp_path / "out" / "students" / "right" / "result.json").read_text())
    assert (result["phases"][0]["seed"], result["score"], result["max_score"]) == (1, 10, 10)
    table = (tmp_path / "out" / "grades.csv").read_bytes()
    for path in (tmp_path / "out" / "students").glob("[ab]*/gradings/*"):
        path.unlink()  # as if the run had been interrupted
    assert graded("out")["blank"].score == 0
    assert (tmp_path / "out" / "grades.csv").read_bytes() == table
