"""The environment step: keeps what fits, says in one line what is wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distlab.course import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its .venv in a folder of the test's own."""
    file = root() / "scripts" / "environment.py"
    spec = importlib.util.spec_from_file_location("environment", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path)
    monkeypatch.setattr(module, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(module, "STAMP", tmp_path / "stamp")
    return module


def test_dependencies_are_those_of_pyproject(environment: ModuleType) -> None:
    project = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert environment.dependencies() == project["dependencies"]


def test_stale_when_dependencies_or_place_change(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not environment.up_to_date()
    environment.PYTHON.symlink_to(sys.executable)
    environment.STAMP.write_text(environment.stamp())
    assert environment.up_to_date()
    monkeypatch.setattr(environment, "dependencies", lambda: ["torch>=9"])
    assert not environment.up_to_date()
    assert environment.usable()  # only lacks something: it is kept
    environment.STAMP.write_text("/somewhere/else\n")
    assert not environment.usable()  # its scripts name the old place


@pytest.mark.parametrize(
    ("version", "kept"),
    [("2.8.0", True), ("2.15+cpu", True), ("2.8.0a0+nv25", True), ("2.7.1", False), ("", False)],
)
def test_torch_in_range_is_kept(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, kept: bool
) -> None:
    monkeypatch.setattr(environment, "ask", lambda python, code: version)
    assert environment.torch_of("python3") == (version if kept else "")


def test_old_python_is_one_line(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "OLDEST", (4, 0))
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"^environment: Python 4\.0 or newer is needed, .*$"):
        environment.suitable_python()


def test_failing_pip_is_one_line(environment: ModuleType) -> None:
    pip = "#!/bin/sh\necho 'WARNING: retrying' >&2\necho 'ERROR: no network' >&2\nexit 1\n"
    environment.PYTHON.write_text(pip)
    environment.PYTHON.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^environment: pip could not .*: ERROR: no network$"):
        environment.pip(["torch"])
