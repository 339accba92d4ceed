"""The learner's image, the devcontainer and docs/machines.md: linted, and what they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from check_jsonschema.cli import main as check_jsonschema
from click.testing import CliRunner
from packaging.requirements import Requirement

from distlab.course.catalogue import root
from tests.deployment.test_containers import lint, needs_hadolint
from tests.distlab.test_front_door import targets

FOLDER = root() / ".devcontainer"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = json.loads((FOLDER / "devcontainer.json").read_text(encoding="utf-8"))
PAGE = (root() / "docs" / "machines.md").read_text(encoding="utf-8")
LOCK = (root() / "requirements.lock").read_text(encoding="utf-8")
SCHEMA = Path(__file__).with_name("devcontainer.schema.json")


def check(file: Path) -> int:
    command = ["--schemafile", str(SCHEMA), "--no-cache", str(file)]
    return CliRunner().invoke(check_jsonschema, command).exit_code


@pytest.mark.parametrize(
    ("name", "value"), [("build", {"context": ".."}), ("remoteUser", 7), ("runArgs", "--shm-size")]
)
def test_devcontainer_fits_the_schema(name: str, value: Any, tmp_path: Path) -> None:
    assert check(FOLDER / "devcontainer.json") == 0
    (tmp_path / "wrong.json").write_text(json.dumps({**SETTINGS, name: value}))
    assert check(tmp_path / "wrong.json") == 1


def test_what_the_devcontainer_names_exists() -> None:
    build = SETTINGS["build"]
    assert (FOLDER / build["dockerfile"]).is_file()
    assert (FOLDER / build["context"]).resolve() == root()
    for file in SETTINGS["customizations"]["codespaces"]["openFiles"]:
        assert (root() / file).is_file()
    assert SETTINGS["postCreateCommand"].removeprefix("make ") in targets()
    assert f"--create-home {SETTINGS['remoteUser']} " in DOCKERFILE
    uid = re.search(r"useradd --uid (\d+)", DOCKERFILE)
    assert uid is not None
    assert f"\nUSER {uid.group(1)}\n" in DOCKERFILE


@needs_hadolint
def test_dockerfile_is_clean(tmp_path: Path) -> None:
    assert lint(tmp_path, DOCKERFILE) == ""
    assert "DL3008" in lint(tmp_path, DOCKERFILE.replace("make=4.3-4.1", "make"))


def test_image_gets_the_lock_alone() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", "!requirements.lock"]
    assert re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) == ["requirements.lock"]


def test_image_leaves_out_what_is_for_gpus_and_nothing_else() -> None:
    found = re.search(r"--invert-match '([^']+)'", DOCKERFILE)
    assert found is not None
    names = {Requirement(line).name for line in LOCK.splitlines() if not line.startswith("#")}
    left = {name for name in names if re.match(found.group(1), name)}
    assert {"nvidia-cublas", "nvidia-nccl-cu13", "triton"} <= left
    assert {name for name in names - left if re.search("nvidia|cuda|triton", name)} == {
        "nvidia-ml-py"
    }
    assert all(re.match("nvidia-|cuda-|triton", name) for name in left)


def test_the_page_says_what_the_dockerfile_says() -> None:
    """The commands are the same, and the image's Python is one that the course supports."""
    commands = re.findall(r"^# {5}(docker .+)$", DOCKERFILE, re.MULTILINE)
    assert len(commands) == 2
    assert all(command in PAGE for command in commands)
    python = re.search(r"^FROM python:(\d+\.\d+)\.\d+-slim", DOCKERFILE, re.MULTILINE)
    assert python is not None
    assert tuple(map(int, python.group(1).split("."))) >= (3, 10)


def test_what_the_page_calls_and_links_exists() -> None:
    assert set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", PAGE, re.MULTILINE)) <= targets()
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
        for line in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = link.partition("#")
        assert not path or (root() / "docs" / path).exists(), link
        assert path or anchor in headings, link
