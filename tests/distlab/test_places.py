"""Gradescope's and GitHub's formats, made from results of the course's own format."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import forked_commands
import jsonschema
import pytest
import yaml

from distlab.classes import autograder, github, gradescope
from distlab.classes.config import ClassConfig, load_class
from distlab.course.catalogue import load_course, root
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report, tier_totals
from distlab.host import zips

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "gradescope.schema.json").read_text("utf-8"))


def exercise(number: str, *checks: CheckResult, **options: Any) -> ExerciseResult:
    found = load_course().exercise(number)
    return ExerciseResult(number, found.title, found.points, checks=list(checks), **options)


def graded() -> Report:
    """One exercise of each kind."""
    wrong = CheckResult(
        "test_b[gloo]", "fail", "3.0 is not 4.0\nin <b>two</b> lines", "unchanged", rank=1
    )
    wrong.title, wrong.line = "The mean of all ranks", "template_trainer.py:70: x"
    right = CheckResult("test_a[virtual]", "pass", title="It waits", tier="virtual")
    blank = CheckResult("test_c[gloo]", "blank", "still to be written", "blank")
    gpu = CheckResult("test_a[cuda]", "needs", "a CUDA GPU", "needs", tier="cuda")
    late = CheckResult("test_d[gloo]", "blocked", "comes after 1.7: solve that first", "blocked")
    exercises = [
        exercise("1.1", right, gpu),
        exercise("1.4", right, wrong, partial=True, used_solution_of=["1.1"]),
        exercise("1.7", blank),
        exercise("1.8", late, late),
    ]
    return Report(1, "templates", 77, "cpu", exercises)


def student(**fields: Any) -> dict[str, Any]:
    """A student's result.json."""
    report = graded()
    plain = {
        "schema": 1,
        "student": "ada",
        "course_version": "0.1.0",
        "submission_hash": "sha256:" + "0f" * 32,
        "late": {"days": 0, "penalty_percent": 0},
        "score": 17.5,
        "max_score": 45,
        "problem": "",
        "tiers": tier_totals(report.exercises),
        "phases": [report.as_json()],
    }
    return plain | fields


def shown(config: ClassConfig | None = None, **fields: Any) -> dict[str, Any]:
    """results.json, which fits Gradescope's fields."""
    found = gradescope.results(student(**fields), config or ClassConfig())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    return found


def test_gradescope_has_a_test_for_each_exercise() -> None:
    found = shown()
    tests = {test["number"]: test for test in found["tests"]}
    assert [*tests] == ["1.1", "1.4", "1.7", "1.8"]
    points = [(test["score"], test["max_score"], test["status"]) for test in tests.values()]
    assert points == [
        (10, 10, "passed"),
        (7, 15, "failed"),
        (0, 10, "failed"),
        (0, 10, "failed"),
    ]
    assert found["score"] == 17.5, "that of the class, after what being late costs"
    assert found["extra_data"]["seeds"] == {"1": 77}
    assert {found["visibility"], tests["1.8"]["visibility"]} == {"visible"}
    assert "leaderboard" not in found


def test_gradescope_tells_check_by_check() -> None:
    tests = {test["number"]: test["output"] for test in shown()["tests"]}
    lines = tests["1.4"].splitlines()
    assert lines[0] == "fail: 7 of 15 points"
    assert "graded with the solution of 1.1" in lines
    assert "pass     It waits (virtual)" in lines
    assert "fail     The mean of all ranks (gloo)" in lines
    for told in ("3.0 is not 4.0", "in <b>two</b> lines", "your line: template_trainer.py:70: x"):
        assert f"    {told}" in lines
    assert any(line.startswith("    likely cause: the result must be written") for line in lines)
    assert "needs    1 check (cuda)" in tests["1.1"]
    assert "blocked  2 checks (gloo)" in tests["1.8"]
    assert "a hint, in your own copy of the course: distlab hint 1.7" in tests["1.7"]
    assert shown()["test_output_format"] == "text", "a message is no HTML, whatever is in it"


RULES = """
[exercises]
points = {"1.4" = 30}
[gradescope]
visibility = "after_published"
hidden = ["1.7"]
hidden_until = "hidden"
stdout = "visible"
leaderboard = true
"""


def test_class_toml_says_what_students_see(tmp_path: Path) -> None:
    (tmp_path / "class.toml").write_text(RULES)
    config = load_class(tmp_path / "class.toml")
    found = shown(config, late={"days": 2, "penalty_percent": 20})
    tests = {test["number"]: test for test in found["tests"]}
    assert (tests["1.4"]["score"], tests["1.4"]["max_score"]) == (14, 30)
    assert {n: t["visibility"] for n, t in tests.items() if t["visibility"] == "hidden"} == {
        "1.7": "hidden"
    }
    assert (found["visibility"], found["stdout_visibility"]) == ("after_published", "visible")
    assert found["leaderboard"][1] == {"name": "Checks passed", "value": 2}
    assert "late: 2 days, which costs 20 % of the points" in found["output"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('visibility = "never"', "expected one of visible, after_due_date"),
        ('hidden = ["1.44"]', "there is no exercise '1.44'; did you mean '1.4'?"),
        ('hidden_until = "visible"', "expected one of after_due_date"),
        ("leader = true", "there is no such key"),
    ],
)
def test_bad_rules_get_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "class.toml").write_text(f"[gradescope]\n{text}\n")
    with pytest.raises(ValueError, match=re.escape(said)):
        load_class(tmp_path / "class.toml")


def test_a_submission_without_a_result_is_told_why() -> None:
    found = shown(phases=[], problem="nothing was handed in", score=0, tiers={})
    assert found["tests"] == []
    assert "not graded: nothing was handed in" in found["output"].splitlines()
    for text in (gradescope.NO_RESULT, gradescope.BROKEN):
        jsonschema.Draft202012Validator(SCHEMA).validate(gradescope.no_result(text))


def test_the_zip_has_what_gradescope_needs_and_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "class.toml").write_text(RULES)
    autograder.pack(tmp_path / "out.zip", tmp_path / "class.toml")
    names = set(zips.read(tmp_path / "out.zip", 200 << 20))
    assert {"setup.sh", "run_autograder", "class.toml", "course/course.toml"} <= names
    assert {"course/pyproject.toml", "course/scripts/environment.py"} <= names
    assert {
        f"course/{e.solution_path.relative_to(root())}" for e in load_course().exercises
    } <= names
    top = {name.split("/")[1] for name in names if name.startswith("course/")}
    assert not top & {".git", ".venv", ".distlab", "notebooks", "benchmarks", "docs"}
    assert not [name for name in names if "mutants" in name or "alternatives" in name]
    assert not [name for name in names if "__pycache__" in name]


# -- GitHub ---------------------------------------------------------------------------------------
def test_github_gets_the_points_of_each_exercise() -> None:
    lines = dict(line.split("=", 1) for line in github.outputs(graded().as_json()))
    assert [*lines] == ["exercise_1_1", "exercise_1_4", "exercise_1_7", "exercise_1_8"]
    found = {name: json.loads(base64.b64decode(text)) for name, text in lines.items()}
    (test,) = found["exercise_1_4"]["tests"]
    assert (found["exercise_1_4"]["max_score"], test["score"], test["status"]) == (15, 7, "fail")
    assert test["message"] == "fail: 3.0 is not 4.0\nin <b>two</b> lines"
    assert found["exercise_1_1"]["tests"][0]["status"] == "pass"
    assert all("\n" not in text for text in lines.values()), "an output is one line"


def test_the_reporter_is_given_every_exercise_by_its_name() -> None:
    """Its runner ``x`` reads the variable ``X_RESULTS``."""
    phases = load_course().phases[:2]
    (job,) = yaml.safe_load(github.workflow(phases))["jobs"].values()
    *_, points, reporter = job["steps"]
    assert points["id"] == "grade"
    runners = reporter["with"]["runners"].split(",")
    assert len(runners) == sum(len(phase.exercises) for phase in phases)
    wanted = {f"{r.upper()}_RESULTS": f"${{{{ steps.grade.outputs.{r} }}}}" for r in runners}
    assert reporter["env"] == wanted


def test_the_example_is_what_the_command_makes() -> None:
    example = (root() / "classroom" / "github-classroom.yml").read_text("utf-8")
    assert example == github.workflow(load_course().phases[:1])


# -- commands -------------------------------------------------------------------------------------
def class_(*arguments: str | Path) -> tuple[int, str, str]:
    """Exit status, output and errors of ``distlab class …``."""
    done = forked_commands.run([sys.executable, "-m", "distlab", "class", *map(str, arguments)])
    return done.returncode, done.stdout, done.stderr


def test_the_commands_write_what_is_tested_here(tmp_path: Path) -> None:
    assert class_("github")[:2] == (0, github.workflow(load_course().phases[:1]))
    status, out, _ = class_("github", tmp_path / "workflows" / "grade.yml", "--phases", "1", "2")
    assert (status, "commit it" in out) == (0, True)
    written = (tmp_path / "workflows" / "grade.yml").read_text("utf-8")
    assert written == github.workflow(load_course().phases[:2])
    (tmp_path / "class.toml").write_text("[exercises]\nphases = [1, 2]\n")
    status, out, errors = class_(
        "gradescope", tmp_path / "out.zip", "--config", tmp_path / "class.toml"
    )
    assert (status, "graded: phase 1, phase 2" in out) == (0, True), errors
    assert (tmp_path / "out.zip").is_file()


def test_a_checkout_is_no_container_for_a_class(tmp_path: Path) -> None:
    """Its answers are open to every user, or the caller is not root: refused in one line."""
    (tmp_path / "in" / "ada").mkdir(parents=True)
    status, _, errors = class_("grade", tmp_path / "in", "--out", tmp_path / "out", "--container")
    assert (status, len(errors.strip().splitlines())) == (2, 1), errors
    assert "no sandbox can be made here: " in errors
    assert not (tmp_path / "out").exists()
