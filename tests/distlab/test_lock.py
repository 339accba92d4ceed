"""requirements.lock: pinned, complete, within pyproject.toml's ranges; ``make`` hands it to pip."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict

import pytest
from packaging.requirements import Requirement

from distlab.course.catalogue import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (root() / "requirements.lock").read_text(encoding="utf-8").splitlines()
PINS = [Requirement(line) for line in LINES if not line.startswith("#")]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SYSTEMS = {"linux": "Linux", "darwin": "Darwin"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(python: str, system: str) -> dict[str, list[str]]:
    """The versions that the lock has of each package for a Python and a system."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": system,
        "platform_system": SYSTEMS[system],
        "platform_machine": "x86_64" if system == "linux" else "arm64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = defaultdict(list)
    for pin in PINS:
        if pin.marker is None or pin.marker.evaluate(environment):
            (one,) = pin.specifier
            assert one.operator == "==", pin
            found[normal(pin.name)].append(one.version)
    for asked in map(Requirement, PROJECT["dependencies"]):
        if asked.marker is None or asked.marker.evaluate(environment):
            (version,) = found[normal(asked.name)]
            assert asked.specifier.contains(version, prereleases=True), (asked, version)
    return found


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_lock_has_one_version_of_each_within_the_ranges(python: str, system: str) -> None:
    found = pinned(python, system)
    assert {name: v for name, v in found.items() if len(v) > 1} == {}
    assert len(found) > 100  # with what the dependencies need
    assert ("nvidia-nccl-cu13" in found) == (system == "linux")


def test_lock_is_for_every_python_that_is_supported() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ([], {}),
        (["LOCKED=1"], {"PIP_CONSTRAINT": "requirements.lock"}),
        (["WHEELS=wheels"], {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"}),
    ],
)
def test_make_tells_pip(given: list[str], settings: dict[str, str]) -> None:
    """A rule that shows its environment stands in for the one that installs."""
    rule = "show:\n\t@env"
    command = ["make", "--no-print-directory", "--eval", rule, "show", *given]
    done = subprocess.run(
        command,
        cwd=root(),
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    found = {name: told[name] for name in told if name.startswith("PIP_")}
    found.pop("PIP_EXTRA_INDEX_URL", None)
    assert found == {k: v if v == "1" else str(root() / v) for k, v in settings.items()}
