"""What a newcomer and a contributor's workflow call is there: README, Makefile, workflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.cli import main as check_jsonschema
from click.testing import CliRunner

from distlab.course.catalogue import root
from distlab.course.version import course_version

WORKFLOWS = root() / ".github" / "workflows"
NAMES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))
README = (root() / "README.md").read_text(encoding="utf-8")


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))["jobs"]


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def targets() -> set[str]:
    text = (root() / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def check_schema(file: Path, kind: str = "github-workflows") -> Any:
    options = ["--builtin-schema", f"vendor.{kind}", "--no-cache"]
    return CliRunner().invoke(check_jsonschema, [*options, str(file)])


@pytest.mark.parametrize("name", NAMES)
def test_workflow_fits_the_schema(name: str, tmp_path: Path) -> None:
    done = check_schema(WORKFLOWS / name)
    assert done.exit_code == 0, done.output
    wrong, text = tmp_path / name, (WORKFLOWS / name).read_text(encoding="utf-8")
    wrong.write_text(text.replace("runs-on:", "runs_on:"))
    assert check_schema(wrong).exit_code == 1


JOBS = [job for name in NAMES for job in jobs(name).values()]


@pytest.mark.parametrize("text", [README, *map(commands, JOBS)])
def test_what_is_called_exists(text: str) -> None:
    """Targets of make, programs of the repository, modules."""
    blocks = re.findall(r"```bash\n(.*?)```|`(make [^`]+)`", text, re.DOTALL)
    called = "\n".join(map("".join, blocks)) if blocks else text
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", called)) <= targets()
    for name in re.findall(r"(?<![\w/])(?:\.venv/bin/)?python3? ([\w/]+\.py)", called):
        assert (root() / name).is_file(), name
    for module in re.findall(r"-m ((?:distlab|solutions|benchmarks)[\w.]*)", called):
        place = root() / module.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), module
    for path in re.findall(r"\btests/[\w/.]+", called):
        assert (root() / path).exists(), path


def test_links_in_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    files = [link for link in links if "://" not in link]
    assert len(files) > 10
    assert [link for link in files if not (root() / link).exists()] == []


def test_workflow_runs_the_oldest_and_the_newest() -> None:
    chosen = jobs("test.yml")
    python = {
        name: step["with"]["python-version"]
        for name, job in chosen.items()
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    }
    project = (root() / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={python["oldest"]}"' in project
    assert "make test-oldest" in commands(chosen["oldest"])
    assert "make test\n" in commands(chosen["newest"]) + "\n"
    assert "make test-all" in commands(jobs("nightly.yml")["all"])
    assert python["newest"] != python["oldest"]
    assert chosen["macos"]["runs-on"].startswith("macos")
    for name in ("newest", "oldest", "slurm", "macos"):
        assert re.search(r"make cpu|--cpu", commands(chosen[name])), f"{name}: 3 GB of CUDA"


def test_the_citation_is_valid_and_of_this_version() -> None:
    file = root() / "CITATION.cff"
    done = check_schema(file, "citation-file-format")
    assert done.exit_code == 0, done.output
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert data["version"] == course_version()
    assert f"# {data['title']}\n" in README


def test_a_release_has_a_line_in_the_changelog() -> None:
    headings = re.findall(r"^## (.+)", (root() / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased" or headings[0].startswith(course_version())
