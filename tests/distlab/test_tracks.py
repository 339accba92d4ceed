"""Ways through the course: what the map shows of them, and the time that a learner has spent."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from distlab import cli
from distlab.commands import learn, watch
from distlab.course import ahead, progress, shares, tracks
from distlab.course.catalogue import load_course, root
from distlab.course.complete import validate

COURSE = load_course()
PHASE = COURSE.phase(1)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress of a learner who has done nothing."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.setattr(cli, "console", lambda: Console(width=100, color_system=None))


def shown(width: int = 100, whole: bool = False) -> str:
    """The map, as in a terminal."""
    file = io.StringIO()
    out = Console(force_terminal=True, width=width, file=file, color_system=None)
    learn.show_map(COURSE, out, whole)
    return file.getvalue()


def passed(*ids: str) -> None:
    for each in ids:
        progress.update(each, verdict="pass", points=COURSE.exercise(each).points)


# -- the tracks of the course ---------------------------------------------------------------------
def test_the_weekend_has_12_exercises_and_ends_in_ones_own_ddp() -> None:
    weekend = COURSE.track("weekend")
    assert len(weekend.exercises) == 12
    assert {"3.9", "3.10"} <= {*weekend.exercises}
    assert [track.name for track in COURSE.tracks] == ["weekend", "month", "all"]
    assert len(COURSE.track("all").exercises) == len(COURSE.exercises)


@pytest.mark.parametrize(
    ("exercises", "problem"),
    [
        (("a", "b"), None),
        (("b", "a"), "track t: its order is not that of the course"),
        (("b",), "track t: b builds on a"),
        (("a", "x"), "track t: there is no exercise x"),
    ],
)
def test_a_track_is_closed_and_in_order(exercises: tuple[str, ...], problem: str | None) -> None:
    track = tracks.Track("t", "T", "about", exercises)
    builds_on: dict[str, set[str]] = {"a": set(), "b": {"a"}}
    assert tracks.problems([track], builds_on) == ([problem] if problem else [])


def test_validation_knows_tracks_and_estimates() -> None:
    weekend = COURSE.track("weekend")
    bad = dataclasses.replace(weekend, exercises=weekend.exercises[1:])
    lazy = [dataclasses.replace(e, minutes=0) if e.id == "1.1" else e for e in COURSE.exercises]
    course = dataclasses.replace(COURSE, exercises=lazy, tracks=[bad, bad])
    found = validate(course, dict.fromkeys((e.id for e in COURSE.exercises), 2))
    assert "1.1: has no estimate: python -m scripts.workload --write" in found
    assert "track weekend is there twice" in found
    assert "track weekend: 1.2 builds on 1.1" in found


def test_a_hand_out_has_only_whole_tracks() -> None:
    ids = {*COURSE.track("weekend").exercises}
    part = dataclasses.replace(COURSE, exercises=[e for e in COURSE.exercises if e.id in ids])
    text = shares.map_of(part, (root() / "course.toml").read_text(encoding="utf-8"))
    assert 'name = "weekend"' in text
    assert 'name = "all"' in text
    assert 'name = "month"' not in text
    assert "[course]\naddress = " in text


# -- the map ---------------------------------------------------------------------------------------
def test_a_beginner_sees_one_phase_and_what_comes_next() -> None:
    text = shown()
    assert "Sharded sampler" in text
    assert "Micro-batches" not in text, "one line for a phase that nobody has begun"
    assert "29 exercises, 450 points, about" in text
    assert len(text.splitlines()) < 40
    whole = shown(whole=True)
    assert all(e.title.split()[0] in whole for e in COURSE.exercises)
    passed("3.1")
    assert "Ring reduce-scatter" in shown(), "begun"


def test_the_whole_map_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "Micro-batches" not in capsys.readouterr().out
    assert cli.main(["--all"]) == 0
    assert "Micro-batches" in capsys.readouterr().out


def test_the_map_shows_the_track_and_why_an_exercise_is_next() -> None:
    assert cli.main(["track", "weekend"]) == 0
    passed("1.1", "1.2")
    text = shown()
    assert "track: weekend, 2 of 12 exercises pass, about" in text
    assert "next: 1.3 Broadcast of model state" in text
    assert "1.5 builds on it; about" in text
    assert "1.6" not in text, "in no weekend"
    assert watch.first_open(COURSE).id == "1.3"
    assert watch._next(COURSE, COURSE.exercise("1.5")).id == "1.7"
    assert watch._next(COURSE, COURSE.exercise("3.12")).id == "3.12", "the last one"
    passed(*COURSE.track("weekend").exercises)
    done = shown()
    assert "12 of 12 exercises pass\n" in done
    assert "next:" not in done


@pytest.mark.parametrize(("width", "columns"), [(60, ""), (80, "minutes"), (100, "difficulty")])
def test_estimates_are_shown_where_there_is_room(width: int, columns: str) -> None:
    progress.choose_track("weekend")
    head = shown(width).splitlines()[2]
    assert head.strip().startswith("verdict") == bool(columns)
    assert columns in head
    assert max(map(len, shown(width).splitlines())) <= width


def test_a_finished_phase_names_its_certificate() -> None:
    assert "distlab certificate" not in shown()
    passed(*(e.id for e in PHASE.exercises))
    assert 'phase 1 is done: distlab certificate 1 --name "…"' in shown()


def test_tracks_are_listed_and_misspelt_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["track", "weekend"]) == 0
    assert cli.main(["track"]) == 0
    said = capsys.readouterr().out
    assert "weekend (your track)" in said
    assert "0 of 34 exercises pass; all of them take about" in said
    assert cli.main(["track", "weekned"]) == 2
    assert "there are weekend, month, all\n" in capsys.readouterr().err
    assert progress.track() == "weekend"
    progress.choose_track("of an older course")
    assert ahead.chosen_track(COURSE).name == "all"


def test_the_map_for_programs(tmp_path: Path) -> None:
    progress.choose_track("weekend")
    passed("1.1")
    progress.update("1.1", seconds=90.0)
    assert cli.main(["--json", str(tmp_path / "map.json")]) == 0
    data = json.loads((tmp_path / "map.json").read_text())
    assert (data["track"], data["next"], data["seconds_spent"]) == ("weekend", "1.2", 90.0)
    assert data["minutes_left"] == sum(
        COURSE.exercise(each).minutes for each in COURSE.track("weekend").exercises[1:]
    )
    assert [e["id"] for e in data["exercises"]] == [*COURSE.track("weekend").exercises]
    assert data["exercises"][0]["verdict"] == "pass"


def test_where_to_ask_is_the_course_s_own_setting() -> None:
    assert COURSE.address == "", "nobody has published it"
    assert "person who gave you this course" in ahead.where_to_ask(COURSE)
    published = dataclasses.replace(COURSE, address="forge.example/course")
    assert ahead.where_to_ask(published) == "Ask at forge.example/course."


# -- the time spent --------------------------------------------------------------------------------
def test_time_between_gradings_counts_and_breaks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the exercise whose code has changed."""
    clock = iter([1000.0, 1120.0, 1120.0 + progress.GAP + 1, 5000.0 + progress.GAP])
    monkeypatch.setattr(progress.time, "time", lambda: next(clock))
    codes = {"1.1": "a", "1.2": "b"}
    monkeypatch.setattr(progress, "fingerprint", lambda e: codes[e.id])
    both = [("1.1", "fail", 0), ("1.2", "blank", 0)]
    progress.record(both)
    assert progress.spent(progress.load()[0], codes) == 0
    codes["1.1"] = "changed"
    progress.record(both)
    entries = progress.load()[0]
    assert (entries["1.1"]["seconds"], entries["1.2"].get("seconds")) == (120.0, None)
    progress.record(both)
    assert progress.spent(progress.load()[0], codes) == 120.0, "a break"
    assert "spent: at least 2 minutes between gradings" in shown()


def test_grading_keeps_the_track_and_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    progress.choose_track("month")
    progress.record([("1.3", "pass", 10)])
    day = progress.entry("1.3")["passed_on"]
    assert progress.track() == "month"
    monkeypatch.setattr(progress.datetime, "date", None)
    progress.record([("1.3", "pass", 10)])
    assert progress.entry("1.3")["passed_on"] == day, "of the first time"
