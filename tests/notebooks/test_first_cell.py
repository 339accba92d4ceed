"""The first cell of a notebook gets the course where it is not, as on Colab."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jupytext
import pytest

from distlab.course.catalogue import root
from scripts import notebooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLONED = ("distlab", "given", "solutions", "notebooks", "phase1_data_parallel", "course.toml")
# of what pyproject.toml asks for: on Colab, or brought by what is
WITH_OTHERS = {"jinja2", "numpy", "scipy", "tensorboard"}


def cell_of(address: str) -> str:
    return notebooks.FIRST_CELL.format(address=address)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The course as a repository that can be cloned."""
    folder = tmp_path / "published"
    for name in CLONED:
        there, ignored = root() / name, shutil.ignore_patterns("__pycache__", "*.ipynb")
        if there.is_dir():
            shutil.copytree(there, folder / name, ignore=ignored)
        else:
            shutil.copy(there, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "the course")
    return folder


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python with this one's packages, but without the toolkit."""
    folder = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (place,) = folder.glob("lib/python*/site-packages")
    lines = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (place / "shared.pth").write_text("\n".join(sorted(lines)) + "\n")
    return folder / "bin" / "python"


def unneeded() -> list[str]:
    """Modules of packages that pyproject.toml asks for and a notebook must do without."""
    project = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {re.split(r"[<>=;\[ ]", line)[0].lower() for line in project["dependencies"]}
    names: dict[str, Any] = {}
    exec(cell_of("").partition("HERE =")[0], names)
    left = asked - set(names["NEEDED"].values()) - WITH_OTHERS
    modules = importlib.metadata.packages_distributions()
    return sorted(name for name, found in modules.items() if {f.lower() for f in found} & left)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git (apt install git)")
def test_a_notebook_begins_in_a_bare_environment(
    repository: Path, bare: Path, tmp_path: Path
) -> None:
    """It clones the course, and the next cells run ranks with the packages that it names."""
    cells = [c.source for c in jupytext.read(notebooks.FOLDER / "phase1_data_parallel.py").cells]
    (averaging,) = (cell for cell in cells if cell.startswith("COUNTS = "))
    (imports,) = (cell for cell in cells if cell.startswith("import sys"))
    blocked = unneeded()
    assert {"jupytext", "check_jsonschema", "ruff"} & set(blocked)
    program = [
        "import importlib.util, sys",
        "assert importlib.util.find_spec('distlab') is None",
        f"sys.modules.update(dict.fromkeys({blocked}))",
        *(cell_of(str(repository)), 'IMPL = "solutions"', imports, averaging),
    ]
    place = tmp_path / "content"
    place.mkdir()
    (place / "program.py").write_text("\n".join(program))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [bare, "program.py"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert f"The course is in {place / 'course'}." in done.stdout
    assert "average_gradients          3.000" in done.stdout


def test_it_installs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def call(command: list[str], check: bool) -> None:
        called.append(command)
        Path("course/notebooks").mkdir(parents=True, exist_ok=True)

    found = importlib.util.find_spec
    monkeypatch.setattr(subprocess, "run", call)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "yaml" and found(name))
    monkeypatch.chdir(tmp_path)
    exec(cell_of("https://example.org/course"), {})
    assert Path.cwd() == tmp_path / "course" / "notebooks"
    clone, install = called
    assert clone == [*"git clone --quiet --depth 1 https://example.org/course course".split()]
    assert install == [sys.executable, *"-m pip install --quiet pyyaml".split()]


def test_it_does_nothing_in_the_course(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (root(), root() / "notebooks"):
        monkeypatch.chdir(folder)
        exec(cell_of("https://example.org/course"), {})
        assert Path.cwd() == folder
    assert capsys.readouterr().out == ""


def test_without_an_address_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="Open this notebook in a clone of the course"):
        exec(cell_of(""), {})
