"""A type checker reads the toolkit, the given code and the benchmarks; nothing is exempted."""

from __future__ import annotations

import subprocess
import sys

from distlab.course.catalogue import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))
CONFIGURATION = PROJECT["tool"]["mypy"]


def test_types_fit() -> None:
    """Reads torch as Any, so it takes seconds; its memory of the last run makes it shorter."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_is_exempted() -> None:
    """Of the toolkit and what measures it; of the solutions those on the list, one by one."""
    assert {"distlab", "benchmarks", "given", "solutions"} <= {*CONFIGURATION["files"]}
    assert CONFIGURATION["strict"]
    milder = {"module", "follow_imports", "follow_imports_for_stubs"}
    for each in CONFIGURATION["overrides"]:
        if not each.keys() <= milder:
            assert all(name.startswith("solutions.") for name in each["module"])
        if "ignore_errors" in each:
            assert not any("*" in name for name in each["module"])
            assert len(each["module"]) <= 7, "the list gets shorter"
