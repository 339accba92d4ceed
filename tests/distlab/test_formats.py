"""What other programs read of a run: JSON by its published schema, JUnit's XML, the version."""

from __future__ import annotations

import copy
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import forked_commands
import jsonschema
import pytest
from referencing import Registry, Resource

from distlab.course import templates
from distlab.course.catalogue import load_course, root
from distlab.course.version import course_version
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report, dumped, loaded

SCHEMAS = root() / "docs" / "schema"


def validator(name: str) -> jsonschema.Draft202012Validator:
    """What a file of this format must fit: ``run`` or ``student``."""
    every = [json.loads(path.read_text("utf-8")) for path in SCHEMAS.glob("*.schema.json")]
    registry = Registry().with_resources((s["$id"], Resource.from_contents(s)) for s in every)
    (schema,) = [s for s in every if s["$id"] == f"{name}.schema.json"]
    checker = jsonschema.Draft202012Validator
    checker.check_schema(schema)
    return checker(schema, registry=registry)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, ET.Element]]:
    """A graded folder, as JSON and JUnit: 1.3 needs a GPU, 1.6 is no Python, 1.7 is blank, and
    1.8, which is blocked by it, is written."""
    folder = tmp_path_factory.mktemp("learner")
    for exercise in templates.files_of(load_course()):
        (folder / exercise.template_path.name).write_text(templates.template_of(exercise))
    solutions = root() / "solutions" / "phase1_data_parallel"
    (folder / "template_trainer.py").write_text((solutions / "trainer.py").read_text())
    (folder / "template_evaluation.py").write_text("def f(:\n")
    file = folder / "template_simple_allreduce.py"
    file.write_text(file.read_text().replace('raise NotImplementedError("exercise 1.8")', "..."))
    out, xml = folder / "r.json", folder / "r.xml"
    command = [sys.executable, str(root() / "test_phase1.py"), "1.3", "1.6", "1.7", "1.8"]
    command += ["--impl", str(folder), "-k", "cuda", "--json", str(out), "--junitxml", str(xml)]
    done = forked_commands.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[1].endswith(f"   course version {course_version()}")
    cases = {case.get("name", ""): case for case in ET.parse(xml).iter("testcase")}
    return json.loads(out.read_text()), cases


def test_a_run_fits_the_published_schema(run: tuple[dict[str, Any], dict[str, ET.Element]]) -> None:
    data, _ = run
    validator("run").validate(data)
    assert data["course_version"] == course_version()
    assert data["student"] is data["submission_hash"] is None
    assert [e["verdict"] for e in data["exercises"]] == ["needs", "error", "blank", "blocked"]
    counted = data["tiers"]["cuda"]
    checks = [c["verdict"] for e in data["exercises"] for c in e["checks"]]
    assert counted == {
        "pass": 0,
        "fail": checks.count("error"),
        "needs": checks.count("needs"),
        "not_run": checks.count("blank") + checks.count("blocked"),
    }


def test_junit_skips_what_was_not_tried(run: tuple[dict[str, Any], dict[str, ET.Element]]) -> None:
    """Blocked and needs are skipped, a blank exercise is a failure that says so."""
    data, cases = run
    tags = {"needs": "skipped", "blocked": "skipped", "blank": "failure", "error": "error"}
    seen = set()
    for check in (c for e in data["exercises"] for c in e["checks"]):
        (told,) = cases[check["name"]]
        assert told.tag == tags[check["verdict"]], check
        assert f"{check['verdict']}: {check['message']}" in told.get("message", "")
        seen.add(check["verdict"])
    assert seen == set(tags)


def damaged(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value changed; None takes it away."""
    other = copy.deepcopy(data)
    *folders, last = path.split(".")
    place: Any = other
    for name in folders:
        place = place[int(name) if name.isdigit() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return other


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", None),
        ("exercises.0.verdict", "passed"),
        ("exercises.0.checks.0.secret", "an answer"),
        ("submission_hash", "sha256:12"),
        ("graded", "yesterday"),
        ("tiers.moon", {"pass": 1, "fail": 0, "needs": 0, "not_run": 0}),
    ],
)
def test_the_schema_refuses_what_it_does_not_name(
    run: tuple[dict[str, Any], dict[str, ET.Element]], path: str, value: Any
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator("run").validate(damaged(run[0], path, value))


STUDENT = {
    "schema": 1,
    "student": "ada",
    "course_version": "0.1.0",
    "submission_hash": "sha256:" + "0f" * 32,
    "submitted": None,
    "graded": "2026-11-23T05:00:00+00:00",
    "late": {"days": 0, "penalty_percent": 0},
    "score": 7.5,
    "max_score": 10,
    "problem": "",
    "tiers": {},
    "phases": [],
    "attempt": 1,
}


def test_a_student_is_made_of_runs(run: tuple[dict[str, Any], dict[str, ET.Element]]) -> None:
    student = validator("student")
    student.validate(STUDENT | {"phases": [run[0]]})
    with pytest.raises(jsonschema.ValidationError):
        student.validate(STUDENT | {"phases": [damaged(run[0], "exercises.0.id", "one")]})
    with pytest.raises(jsonschema.ValidationError):
        student.validate(STUDENT | {"schema": 2})


def test_all_fields_of_a_report_reach_another_process() -> None:
    check = CheckResult("a", "fail", "3 is not 4", "wrong", 1, printed={1: "x"}, tier="virtual")
    result = ExerciseResult("1.4", "Averaging", 10, checks=[check])
    report = Report(1, "x", 5, "cpu", [result], ["a note"], "0.1.0", "then", "ada", "sha256:1")
    assert loaded(dumped(report)) == report


def test_one_version_for_pip_and_for_the_course(tmp_path: Path) -> None:
    shown = forked_commands.run([sys.executable, "-m", "distlab", "--version"]).stdout
    assert shown == f"distlab {course_version()}\n"
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8"\n')
    assert course_version(tmp_path) == "7.8", "of the folder, whatever is installed"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"pyproject\.toml names no course version"):
        course_version(tmp_path / "none")
