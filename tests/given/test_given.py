"""Given code stands alone, and learners' files need nothing but it and the toolkit."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from distlab.course import templates
from distlab.course.catalogue import load_course, root
from tests import forked_commands

FILES = templates.files_of(load_course())
IMPORT = re.compile(r"^[ \t]*(?:from|import) (\w[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE)
IMPORT_ALL = """
import importlib, sys
sys.modules["solutions"] = None  # wherever else some may be
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name)
"""


def modules(text: str) -> Iterator[str]:
    """The names of all modules that the text imports, anywhere in it."""
    for module, names in IMPORT.findall(text):
        yield module
        yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())


def imported(text: str) -> set[str]:
    """The packages of these modules."""
    return {name.split(".")[0] for name in modules(text)}


def graded_checks() -> set[Path]:
    """The files with graded checks, and all files of the tests that they import."""
    found: set[Path] = set()
    todo = [
        path
        for path in (root() / "tests").glob("phase*/test_*.py")
        if '@exercise("' in path.read_text(encoding="utf-8")
    ]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for name in modules(path.read_text(encoding="utf-8")):
            parts = name.split(".")
            todo.append((root() if parts[0] == "tests" else path.parent).joinpath(*parts))
            todo[-1] = todo[-1].with_suffix(".py")
    return found


def test_given_code_imports_neither_solutions_nor_the_toolkit() -> None:
    files = sorted((root() / "given").glob("*.py"))
    assert len(files) > 5
    for path in files:
        wrong = {"solutions", "distlab", "tests"} & imported(path.read_text(encoding="utf-8"))
        assert not wrong, f"given/{path.name} imports {wrong}"


def test_no_template_imports_solutions() -> None:
    for exercise in FILES:
        assert "solutions" not in imported(templates.template_of(exercise)), exercise.file


def test_every_template_can_be_imported_where_there_are_no_solutions(tmp_path: Path) -> None:
    without_caches = shutil.ignore_patterns("__pycache__")
    for folder in ("distlab", "given"):
        shutil.copytree(root() / folder, tmp_path / folder, ignore=without_caches)
    shutil.copy(root() / "course.toml", tmp_path)
    names = []
    for exercise in FILES:
        path = tmp_path / exercise.template_path.relative_to(root())
        path.parent.mkdir(exist_ok=True)
        path.write_text(templates.template_of(exercise), encoding="utf-8")
        names.append(f"{path.parent.name}.{path.stem}")
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = forked_commands.run(command, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == names


def test_graded_checks_and_their_helpers_do_not_import_solutions() -> None:
    """They ask ``impl.module`` for another exercise's part, ``impl.solution`` for the course's."""
    files = graded_checks()
    assert {"fsdp_models.py", "compression.py", "bad_input.py"} <= {p.name for p in files}
    found = [p.name for p in files if "solutions" in imported(p.read_text(encoding="utf-8"))]
    assert not found


def test_installing_takes_the_toolkit_and_the_given_code() -> None:
    code = "from setuptools.config.pyprojecttoml import read_configuration as read\n"
    code += "print(*read('pyproject.toml')['tool']['setuptools']['packages'])"
    done = forked_commands.run([sys.executable, "-c", code], cwd=root(), timeout=300, check=True)
    files = [path for top in ("distlab", "given") for path in (root() / top).rglob("*.py")]
    want = {".".join(path.parent.relative_to(root()).parts) for path in files}
    assert {"given", "distlab.ranks"} < want
    assert set(done.stdout.split()) == want


def test_the_type_of_a_group_and_the_check_of_membership_are_written_once() -> None:
    files = [p for folder in ("given", "solutions") for p in (root() / folder).rglob("*.py")]
    for what in (r"^Group(: TypeAlias)? = ", r"get_rank\(\w+\) < 0|raise ValueError\(.*no member"):
        pattern = re.compile(what, re.MULTILINE)
        found = [p.name for p in files if pattern.search(p.read_text(encoding="utf-8"))]
        # the file of rank_in, which reads the rank before it looks at it
        assert found == ["agreement.py"], f"{what}: {found}"
