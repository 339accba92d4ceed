"""The table of PyTorch's scenarios: what rows name exists, and each port has a row."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest

from distlab.course.catalogue import load_course, root
from scripts.pytorch_scenarios import PAGE, VERDICTS, load, page

HERE = Path(__file__).resolve().parent
TABLE = load()
ROWS: list[dict[str, Any]] = TABLE["row"]
OF = {"same": "ported", "limit": "says", "not applicable": "reason"}


def ports_here() -> set[str]:
    """All ports, as ``file::function``."""
    found = set()
    for file in sorted(HERE.glob("test_*.py")):
        if file != Path(__file__).resolve():
            body = ast.parse(file.read_text(encoding="utf-8")).body
            functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            found |= {f"{file.name}::{name}" for name in functions if name.startswith("test_")}
    return found


@functools.cache
def docstrings() -> str:
    """Every docstring of the solutions, with single spaces."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = []
    for file in sorted((root() / "solutions").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                texts += [ast.get_docstring(node) or ""]
    return " ".join(" ".join(texts).split())


def test_rows_have_what_their_verdict_asks_for() -> None:
    for row in ROWS:
        assert row["verdict"] in VERDICTS, row["scenario"]
        assert row.get(OF[row["verdict"]]), row["scenario"]
        assert row["file"] in TABLE["sources"], row["file"]
        assert row["names"], row["scenario"]


def test_no_name_is_listed_twice() -> None:
    names = [(row["file"], name) for row in ROWS for name in row["names"]]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


def test_every_port_has_a_row_and_every_row_its_port() -> None:
    named = {name for row in ROWS for name in row.get("ported", [])}
    assert named - ports_here() == set(), "named, and not there"
    assert ports_here() - named == set(), "there, and not named"


@pytest.mark.parametrize("says", sorted({row["says"] for row in ROWS if "says" in row}))
def test_limits_are_sentences_of_docstrings(says: str) -> None:
    assert " ".join(says.split()) in docstrings()


def test_exercises_exist() -> None:
    known = {exercise.id for exercise in load_course().exercises}
    assert {e for row in ROWS for e in row.get("exercises", [])} <= known


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(TABLE), "python -m scripts.pytorch_scenarios"
