"""What a benchmark's numbers depend on: its own file and what it imports, also indirectly."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import book

FILES = {
    "benchmarks/one.py": "from solutions.sums import add\n\nfrom .common import now\n",
    "benchmarks/common.py": "import time as now\n",
    "benchmarks/page.py": "",
    "solutions/__init__.py": "",
    "solutions/sums.py": "def add():\n    from given import start\n",
    "solutions/other.py": "",
    "given/start.py": "one = 1\n",
}


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("benchmarks/one.py", "from solutions.sums import add\n", True),
        ("benchmarks/common.py", "import math as now\n", True),
        ("solutions/sums.py", "add = 1\n", True),
        ("given/start.py", "one = 2\n", True),
        ("given/start.py", "one = 1  # a comment\n", False),
        ("solutions/other.py", "one = 1\n", False),
        ("benchmarks/page.py", "one = 1\n", False),
    ],
)
def test_numbers_depend_on_what_a_benchmark_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, changes: bool
) -> None:
    monkeypatch.setattr(book, "root", lambda: tmp_path)
    for each, content in FILES.items():
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(content, encoding="utf-8")
    before = book.sources.__wrapped__("one")
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert (book.sources.__wrapped__("one") != before) == changes
