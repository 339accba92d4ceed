"""Labs in the map: their points, the next one, the list of all of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from distlab import cli
from distlab.commands import lab_map, learn
from distlab.course import progress
from distlab.course.catalogue import load_course
from distlab.labs import index
from scripts import lab_index

COURSE = load_course()


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress of a learner who has done nothing."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.setattr(cli, "console", lambda: Console(width=100, color_system=None))


def shown() -> str:
    file = io.StringIO()
    learn.show_map(COURSE, Console(width=100, file=file, color_system=None))
    return file.getvalue()


def test_the_list_is_in_step_with_what_makes_the_labs() -> None:
    assert lab_index.main([]) == 0
    assert len({lab.id for lab in index.listed()}) == len(index.listed())


def test_points_of_labs_stand_apart_from_those_of_exercises() -> None:
    progress.update("1.4", verdict="pass", points=15)
    progress.update_lab("D1.01", points=7, most=10)
    text = shown()
    assert "  15 of 100 points\n" in text
    assert "labs: 7 of" in text
    assert "debug 1 of" in text


def test_the_next_lab_follows_an_exercise_that_passes() -> None:
    assert "lab: " not in shown()
    progress.update("1.4", verdict="pass", points=15)
    assert "begin  distlab lab debug D1.01" in shown()
    progress.update_lab("D1.01", points=0, most=10)
    assert "begin  distlab lab debug D1.02" in shown(), "one that was tried is not next"


def test_the_map_for_programs_has_labs(tmp_path: Path) -> None:
    progress.choose_track("weekend")
    progress.update_lab("T3.3", points=9, most=15, hints=1)
    assert cli.main(["--json", str(tmp_path / "map.json")]) == 0
    data = json.loads((tmp_path / "map.json").read_text())
    labs = {lab["id"]: lab for lab in data["labs"]}
    assert data["next_lab"] is None
    assert "P1.3" in labs
    assert "P1.8" not in labs, "in no weekend"
    assert all("exercise" not in lab for lab in labs.values())


def test_all_labs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress.update_lab("T3.3", points=9, most=15, hints=1)
    assert cli.main(["lab", "list", "--phase", "3", "--json", str(tmp_path / "labs.json")]) == 0
    said = capsys.readouterr().out
    (line,) = (line for line in said.splitlines() if line.startswith("  T3.3 "))
    assert line.split()[1:5] == ["tests", "2", "9/15", "1"]
    data = json.loads((tmp_path / "labs.json").read_text())
    assert {row["phase"] for row in data} == {3}
    assert cli.main(["lab", "list", "--phase", "9"]) == 2
    assert cli.main(["lab", "list", "--phase", "0"]) == 0
    assert "Whole runs" in capsys.readouterr().out


def test_a_hand_out_without_labs_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(index, "index_file", lambda: tmp_path / "index.json")
    index.listed.cache_clear()
    try:
        with pytest.raises(ValueError, match="your instructor hands labs out"):
            lab_map.main(cli._parser("lab").parse_args(["lab", "list"]), Console())
        assert "labs:" not in shown()
    finally:
        index.listed.cache_clear()
