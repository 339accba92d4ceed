"""docs/gpu_only.md names checks that there are, and everything that solutions ask of a GPU."""

from __future__ import annotations

import ast
import re

from distlab.commands import gpu_run
from distlab.course.catalogue import load_course, root

PAGE = (root() / "docs" / "gpu_only.md").read_text(encoding="utf-8")
USED = re.compile(r"torch\.cuda\.(\w+)|\b(pin_memory|non_blocking)\b")
CHECK = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def tiers_of(path: str, name: str) -> set[str]:
    """The tiers that a check names in its decorator; AssertionError if there is no such check."""
    tree = ast.parse((root() / path).read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1, f"{path} has no check {name}"
    for decorator in found[0].decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "exercise":
            named = [a.value for a in decorator.args[1:2] if isinstance(a, ast.Constant)]
            return set(str(named[0]).split()) if named else {"gloo"}
    raise AssertionError(f"{path}::{name} is a check of no exercise")


def test_each_interface_has_a_check_on_a_gpu_or_a_part_of_the_doctor() -> None:
    parts = {part.name for part in gpu_run.parts(2, {"legacy": {}})}
    for interface, *_, gpu, everywhere in rows():
        named = CHECK.findall(gpu)
        for path, name in named:
            assert "cuda" in tiers_of(path, name), f"{interface}: {name} does not run on a GPU"
        asked = set(re.findall(r"`([^`]+)`", re.sub(CHECK, "", gpu)))
        assert asked <= parts, interface
        assert named or asked, interface
        for path, name in CHECK.findall(everywhere):
            assert tiers_of(path, name) - {"cuda"}, f"{interface}: {name} runs only on a GPU"


def test_exercises_exist() -> None:
    known = {exercise.id for exercise in load_course().exercises}
    for cells in rows():
        assert set(re.findall(r"\b\d\.\d+\b", cells[2])) <= known, cells[0]


def test_what_solutions_ask_of_a_gpu_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows())))
    used = set()
    for folder in ("solutions", "given"):
        for path in (root() / folder).rglob("*.py"):
            found = USED.findall(path.read_text(encoding="utf-8"))
            used |= {name for pair in found for name in pair if name}
    assert len(used) > 15
    assert used <= named, f"not in docs/gpu_only.md: {', '.join(sorted(used - named))}"


def test_checks_that_need_a_gpu_are_named() -> None:
    """Those that run nowhere else."""
    named = {name for _, name in CHECK.findall(PAGE)}
    for path in (root() / "tests").glob("phase*/test_*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'@exercise\("[\d.]+", "cuda".*?^def (\w+)', text, re.S | re.M):
            assert name in named, name
