"""The engine of a class, with a grader that reads verdicts off a file: resuming, tables."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import html
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

from distlab.classes import graders, results
from distlab.classes.config import Caps, ClassConfig, Late
from distlab.classes.engine import grade_class
from distlab.classes.lab_rules import LabResult
from distlab.classes.outcomes import load_results
from distlab.classes.results import Attempt, StudentReports
from distlab.classes.submissions import Submission, find_entries
from distlab.cli import main
from distlab.course.catalogue import load_course, root
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report

FILE = "phase1_data_parallel/template_trainer.py"
DUE = datetime.datetime(2026, 3, 16, 20, tzinfo=datetime.timezone.utc)
RULES = ClassConfig(only=("1.3", "1.4"), phases=(1,), due=DUE, late=Late(percent_per_day=10))
EVIL = "</pre><script>alert(1)</script>```\n# [a](javascript:b) \x1b[31m"


class Fake:
    """Verdicts stand in the file: ``1.3 1.4`` passes both; other words make trouble."""

    def __init__(self, tally: Path) -> None:
        self.tally, self.home = tally, os.getpid()

    def __call__(self, submission: Submission, config: ClassConfig) -> StudentReports:
        words = (submission.folder / FILE).read_text().split()
        with self.tally.open("a") as file:
            file.write(f"{submission.student}\n")
        if "dies" in words:
            os._exit(3)
        if "raises" in words:
            raise RuntimeError("a defect of the grader")
        if "sleeps" in words:
            time.sleep(600)
        if "kills" in words and len(graded(self.tally)) == 3:
            os.kill(self.home, signal.SIGKILL)
            time.sleep(600)
        made = Report(1, "templates", config.seed, "cpu", graded="2026-03-20T00:00:00+00:00")
        made.course_version = "0.1.0"
        for e in config.exercises():
            check = CheckResult("test_it[virtual]", "pass", title="It works", tier="virtual")
            if e.id not in words:
                check.verdict, check.message, check.cause = "fail", EVIL, "wrong"
                check.printed = {0: EVIL}
            made.exercises.append(ExerciseResult(e.id, e.title, e.points, FILE, checks=[check]))
        labs = [LabResult(n, "D1.01", 0.5, ("place 1 of 2: x",)) for n in config.labs if n in words]
        return StudentReports((made,), tuple(labs))


def graded(tally: Path) -> list[str]:
    return tally.read_text().split() if tally.exists() else []


@pytest.fixture
def hand_in(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, words: str, hours: float = -1) -> Path:
        path = tmp_path / "in" / name / FILE
        path.parent.mkdir(parents=True)
        path.write_text(words)
        os.utime(path, ((DUE + datetime.timedelta(hours=hours)).timestamp(),) * 2)
        return path

    (tmp_path / "in").mkdir()
    return write


def grade(
    home: Path, rules: ClassConfig = RULES, out: str = "out", jobs: int = 2
) -> dict[str, Attempt]:
    entries = find_entries(home / "in", rules)
    fake = Fake(home / "tally")
    return grade_class(rules, entries, home / out, jobs=jobs, grader=fake, way="fake")


def table(home: Path, out: str = "out") -> dict[str, list[str]]:
    with (home / out / "grades.csv").open() as file:
        return {row[0]: row[1:] for row in csv.reader(file)}


def test_the_table_and_what_lies_beside_it(tmp_path: Path, hand_in: Callable[..., Path]) -> None:
    hand_in("ada", "1.3 1.4")
    hand_in("grace", "1.3", hours=25)
    hand_in("none", "")
    final = grade(tmp_path)
    assert [*final] == ["ada", "grace", "none"]
    assert table(tmp_path) == {
        "id": ["1.3", "1.4", "total", "late", "version"],
        "ada": ["10", "15", "25", "0", "0.1.0"],
        "grace": ["10", "0", "8", "2", "0.1.0"],
        "none": ["0", "0", "0", "0", "0.1.0"],
    }
    names = {p.name for p in (tmp_path / "out" / "students" / "grace").iterdir() if p.is_file()}
    assert names >= {"result.json", "feedback.html", "feedback.md", "log.txt"}
    facts = json.loads((tmp_path / "out" / "class.json").read_text())
    assert facts["config"]["due"] == DUE.isoformat()
    assert facts["fingerprint"] == results.fingerprint()


def test_labs_stand_in_the_table_beside_exercises(
    tmp_path: Path, hand_in: Callable[..., Path]
) -> None:
    hand_in("ada", "1.3 D1.01")
    hand_in("grace", "1.3")
    rules = dataclasses.replace(RULES, labs={"D1.01": 8}, released=("1.4",))
    grade(tmp_path, rules)
    rows = table(tmp_path)
    assert rows["id"] == ["1.3", "1.4", "D1.01", "total", "late", "version"]
    assert rows["ada"][:4] == ["10", "0", "4", "14"]
    assert rows["grace"][:4] == ["10", "0", "0", "10"]
    home = tmp_path / "out" / "students" / "ada"
    assert "lab D1.01: 4 of 8 points: place 1 of 2" in (home / "feedback.html").read_text()
    (lab,) = json.loads((home / "result.json").read_text())["labs"]
    assert (lab["points"], lab["max_points"], lab["share"]) == (4, 8, 0.5)
    assert load_results(tmp_path / "out").students[0].labs == {"D1.01": 0.5}
    grade(tmp_path, dataclasses.replace(rules, labs={"D1.01": 10}))
    assert table(tmp_path)["ada"][2] == "5", "other points need no new grading"
    assert len(graded(tmp_path / "tally")) == 2
    with pytest.raises(ValueError, match=r"\(labs changed since\)"):
        grade(tmp_path, dataclasses.replace(rules, labs={"D1.02": 8}))


def test_results_fit_the_published_schema(tmp_path: Path, hand_in: Callable[..., Path]) -> None:
    hand_in("ada", "1.3 D1.01")
    hand_in("late", "1.3", hours=30)
    (tmp_path / "in" / "broken.zip").write_text("no zip")
    grade(tmp_path, ClassConfig(**vars(RULES) | {"students": ("absent",), "labs": {"D1.01": 3}}))
    schemas = root() / "docs" / "schema"
    run, student = (
        json.loads((schemas / f"{name}.schema.json").read_text()) for name in ("run", "student")
    )
    registry = referencing.Registry().with_resource(
        "run.schema.json", referencing.Resource.from_contents(run)
    )
    for name in ("ada", "late", "broken", "absent"):
        result = json.loads((tmp_path / "out" / "students" / name / "result.json").read_text())
        jsonschema.Draft202012Validator(student, registry=registry).validate(result)
        assert bool(result["problem"]) == (name in ("broken", "absent"))


def test_feedback_is_the_grader_s_and_holds_nothing_alive(
    tmp_path: Path, hand_in: Callable[..., Path]
) -> None:
    hand_in("a<b>", "1.3")
    (final,) = grade(tmp_path)
    folder = tmp_path / "out" / "students" / final
    page, text = ((folder / f"feedback.{e}").read_text() for e in ("html", "md"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    fence = re.findall(r"(?m)^(`{4,})text$", text)
    assert len(fence) == 1
    assert text.count(fence[0]) == 2, "nothing in the fence ends it"
    title = load_course().exercise("1.4").title
    for line in (f"1.4 {title}: fail", "check: It works", "score: 10 of 25 points"):
        assert line in text
        assert line in html.unescape(re.sub("<[^>]+>", "", page))
    assert "\x1b" not in page + text
    assert str(tmp_path) not in page + text


def test_what_has_not_changed_is_not_graded_again(
    tmp_path: Path, hand_in: Callable[..., Path]
) -> None:
    for name in ("ada", "grace"):
        hand_in(name, "1.3")
    grade(tmp_path)
    before = (tmp_path / "out" / "grades.csv").read_bytes()
    grade(tmp_path)
    assert graded(tmp_path / "tally") == ["ada", "grace"]
    assert (tmp_path / "out" / "grades.csv").read_bytes() == before
    (tmp_path / "in" / "ada" / FILE).write_text("1.3 1.4")
    os.utime(tmp_path / "in" / "ada" / FILE, (0, 0))
    grade(tmp_path)
    assert graded(tmp_path / "tally") == ["ada", "grace", "ada"]
    (tmp_path / "in" / "grace").rename(tmp_path / "grace")
    grade(tmp_path)
    assert not (tmp_path / "out" / "students" / "grace" / "result.json").exists()
    (tmp_path / "grace").rename(tmp_path / "in" / "grace")
    kinder = ClassConfig(**vars(RULES) | {"points": {"1.4": 30}})
    grade(tmp_path, kinder)
    assert len(graded(tmp_path / "tally")) == 3, "neither points nor coming back cost one"
    assert table(tmp_path)["ada"] == ["10", "30", "40", "0", "0.1.0"]


def test_a_killed_run_goes_on(tmp_path: Path, hand_in: Callable[..., Path]) -> None:
    """Killed in the middle, as by a power cut: the same table, and nothing is graded twice."""
    for number in range(6):
        hand_in(f"student-{number}", f"{'1.3' if number % 2 else '1.3 1.4'} kills")
    pid = os.fork()
    if pid == 0:
        try:
            grade(tmp_path, jobs=1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "out" / "grades.csv").exists()
    assert graded(tmp_path / "tally") == [f"student-{n}" for n in range(3)]
    kept = {p.parts[-3] for p in (tmp_path / "out").glob("students/*/gradings/*.json")}
    assert "student-0" in kept
    grade(tmp_path, jobs=1)
    left = [f"student-{n}" for n in range(6) if f"student-{n}" not in kept]
    assert graded(tmp_path / "tally")[3:] == left
    (tmp_path / "tally").rename(tmp_path / "before")
    for path in (tmp_path / "in").glob(f"*/{FILE}"):
        path.write_text(path.read_text().replace("kills", "spares"))
        os.utime(path, ((DUE - datetime.timedelta(hours=1)).timestamp(),) * 2)
    grade(tmp_path, out="whole")
    assert len(graded(tmp_path / "tally")) == 6
    tables = [(tmp_path / name / "grades.csv").read_bytes() for name in ("out", "whole")]
    assert tables[0] == tables[1]


def test_trouble_with_one_is_a_line_and_the_others_go_on(
    tmp_path: Path, hand_in: Callable[..., Path]
) -> None:
    for name in ("dies", "raises", "sleeps", "well"):
        hand_in(name, f"1.3 {name}")
    (tmp_path / "in" / "broken.zip").write_text("no zip")
    (tmp_path / "in" / "empty").mkdir()
    rules = ClassConfig(**vars(RULES) | {"caps": Caps(seconds=2)})
    final = grade(tmp_path, rules)
    assert {name: attempt.problem for name, attempt in final.items()} == {
        "broken": "broken.zip can't be read: File is not a zip file",
        "dies": "the grader's process ended",
        "empty": final["empty"].problem,
        "raises": "the grader's process ended",
        "sleeps": "grading took more than 2 s",
        "well": "",
    }
    assert "no Python file" in final["empty"].problem
    log = (tmp_path / "out" / "students" / "raises" / "log.txt").read_text()
    assert "RuntimeError: a defect of the grader" in log
    assert "not graded: the grader's process ended" in log
    before = graded(tmp_path / "tally")
    hand_in_again = tmp_path / "in" / "sleeps" / FILE
    hand_in_again.write_text("1.3")
    grade(tmp_path, rules)
    again = graded(tmp_path / "tally")[len(before) :]
    assert sorted(again) == ["dies", "raises", "sleeps"], "only these are tried again"


def test_of_several_attempts_one_counts(tmp_path: Path, hand_in: Callable[..., Path]) -> None:
    hand_in("ada--1", "1.3 1.4", hours=-9)
    hand_in("ada--2", "1.3", hours=-5)
    hand_in("ada--3", "1.3 1.4", hours=5)
    hand_in("grace--1", "", hours=1)
    hand_in("grace--2", "1.4", hours=2)
    final = grade(tmp_path)
    assert {name: (a.number, a.score) for name, a in final.items()} == {
        "ada": (2, 10),  # the last in time
        "grace": (2, 13.5),  # the last of all, where none was in time
    }
    assert sorted(graded(tmp_path / "tally")) == ["ada", "grace"], "the others are not graded"
    best = ClassConfig(**vars(RULES) | {"counts": "best"})
    final = grade(tmp_path, best, "best")
    assert {name: (a.number, a.score) for name, a in final.items()} == {
        "ada": (1, 25),
        "grace": (2, 13.5),
    }
    log = (tmp_path / "best" / "students" / "ada" / "log.txt").read_text()
    assert "attempt 1 counts (the best)" in log
    (tmp_path / "in" / "ada.zip").write_text("broken, and newer than the others")
    (tmp_path / "in" / "submissions.csv").write_text("entry,submitted\nada.zip,2026-03-16 19:59\n")
    assert grade(tmp_path)["ada"].number == 2, "what can't be read does not replace what can"


def test_teams_and_those_who_hand_in_nothing(tmp_path: Path, hand_in: Callable[..., Path]) -> None:
    hand_in("grace", "1.3 1.4", hours=20)
    hand_in("=HYPERLINK(1)", "1.3")
    rules = ClassConfig(
        **vars(RULES)
        | {
            "teams": {"blue": ("grace", "-barbara")},
            "students": ("ada", "grace"),
            "extensions": {"-barbara": DUE + datetime.timedelta(days=1)},
        }
    )
    final = grade(tmp_path, rules)
    assert final["blue"].score == 25
    assert final["ada"].problem == "nothing was handed in"
    rows = table(tmp_path)
    assert rows["grace"] == rows["'-barbara"] == ["10", "15", "25", "0", "0.1.0"]
    assert not [name for name in rows if name[0] in "=+-@"]


def test_two_runs_do_not_write_into_one_folder(
    tmp_path: Path, hand_in: Callable[..., Path]
) -> None:
    hand_in("ada", "1.3")

    def meddles(submission: Submission, config: ClassConfig) -> StudentReports:
        with pytest.raises(ValueError, match="another grading is writing there"):
            grade(tmp_path)
        return Fake(tmp_path / "tally")(submission, config)

    entries = find_entries(tmp_path / "in", RULES)
    final = grade_class(RULES, entries, tmp_path / "out", jobs=1, grader=meddles, way="fake")
    assert final["ada"].score == 10


def test_the_command_shows_what_other_checks_change(
    tmp_path: Path,
    hand_in: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hand_in("ada", "1.3")
    hand_in("grace", "1.3 1.4")

    def fake(walls: bool, container: bool) -> Fake:
        return Fake(tmp_path / "tally")

    monkeypatch.setattr(graders, "ClassGrader", fake)
    (tmp_path / "class.toml").write_text('[exercises]\nonly = ["1.3", "1.4"]\n')
    out = tmp_path / "out"
    rest = [str(tmp_path / "in"), "--out", str(out), "--unsafe", "--jobs", "1"]
    rest += ["--config", str(tmp_path / "class.toml")]
    assert main(["class", "grade", *rest]) == 0
    said = capsys.readouterr().out
    assert "ada: 10 of 25 points   (1 of 2 done, 1 running, 0 left, about" in said
    old = (out / "grades.csv").read_bytes()

    monkeypatch.setattr(results, "fingerprint", lambda: "of other checks")
    assert main(["class", "grade", *rest]) == 2
    assert "distlab class regrade" in capsys.readouterr().err
    seen = (out / "students" / "grace" / "handed-in" / "1" / FILE).read_text()
    assert seen == "1.3 1.4", "a refused run changes nothing"
    (tmp_path / "in" / "grace" / FILE).write_text("1.4")
    assert main(["class", "regrade", *rest]) == 0
    said = capsys.readouterr().out
    assert "grace: 25 → 15" in said
    assert "1.3: pass 10 → fail 0; now fails: It works (wrong)" in said
    assert "ada: 10 →" not in said
    assert "1 of 2 change" in said
    assert (out / "grades.csv").read_bytes() == old, "nothing is overwritten"
    many = len(graded(tmp_path / "tally"))
    assert main(["class", "regrade", *rest, "--accept"]) == 0
    assert len(graded(tmp_path / "tally")) == many, "what was graded beside is taken"
    assert table(tmp_path)["grace"][2] == "15"
    assert (tmp_path / "out.before-1" / "grades.csv").read_bytes() == old
    assert main(["class", "grade", *rest]) == 0


def test_wrong_calls_are_told(tmp_path: Path, hand_in: Callable[..., Path], capsys: Any) -> None:
    hand_in("ada", "1.3")
    here = str(tmp_path / "in")
    calls = {
        ("grade", here, "--out", f"{here}/out"): "lies among the submissions",
        ("grade", here, "--out", f"{tmp_path}/out", "--phases", "7"): "there is no phase 7",
        ("grade", here, "--out", f"{tmp_path}/out", "--jobs", "0"): "--jobs: at least 1",
        ("grade", f"{here}/none", "--out", f"{tmp_path}/out"): "no such folder",
        ("regrade", here, "--out", f"{tmp_path}/out"): "has no results",
    }
    for call, message in calls.items():
        assert main(["class", *call, "--unsafe"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
