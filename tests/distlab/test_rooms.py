"""The toolkit's rooms: imports go one way, no circle, no long file; each rule has its breach.

``rooms.py`` has the table and reads the imports; docs/structure.md shows them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.course.catalogue import root
from scripts import structure
from tests.distlab import rooms

HOME = root() / "distlab"


def shown(problems: list[str]) -> str:
    return "\n".join(problems)


def test_nothing_lies_beside_the_rooms() -> None:
    problems = rooms.strangers(HOME)
    assert not problems, shown(problems)


@pytest.mark.parametrize("rule", [rooms.upward, rooms.circles, rooms.for_types, rooms.unexplained])
def test_imports_keep_the_order(rule: Callable[[list[rooms.Import]], list[str]]) -> None:
    problems = rule(rooms.imports(HOME))
    assert not problems, shown(problems)


@pytest.mark.parametrize("folder", ["distlab", "given", "solutions", "benchmarks"])
def test_files_and_functions_fit_a_screen(folder: str) -> None:
    problems = rooms.too_long(root() / folder)
    assert not problems, shown(problems)


def test_the_table_is_the_toolkit() -> None:
    there = {path.name for path in HOME.iterdir() if (path / "__init__.py").exists()}
    assert {*rooms.ROOMS} == there | {"cli"}
    modules = {each.source for each in rooms.imports(HOME)}
    assert {rooms.room(name) for name in modules} >= {*rooms.ROOMS} - {"host"}


def test_each_room_says_what_it_is_for() -> None:
    """In its first line, in a paragraph of the documentation, and there in the order of imports."""
    text = (root() / "docs" / "structure.md").read_text(encoding="utf-8")
    assert [*re.findall(r"^\*\*`(\w+)/`\*\* ", text, re.M), "cli"] == [*rooms.ROOMS]
    for name in rooms.ROOMS[:-1]:
        assert ast.get_docstring(ast.parse((HOME / name / "__init__.py").read_text()))


def test_the_picture_shows_the_imports() -> None:
    again = "draw it again: python -m scripts.structure"
    assert structure.told(structure.arrows()) in structure.PICTURE.read_text("utf-8"), again


def test_the_picture_sets_importers_above() -> None:
    arrows = [("cli", "commands"), ("cli", "host"), ("commands", "host"), ("commands", "course")]
    level = structure.levels(arrows)
    assert all(level[a] > level[b] for a, b in arrows)
    thin = [each for each in arrows if structure.is_shown_by_others(each, arrows)]
    assert thin == [("cli", "host")]
    position = structure.positions(arrows)
    assert len({*position.values()}) == len(rooms.ROOMS), "no box covers another"


def tree(home: Path, files: dict[str, str]) -> Path:
    """A package in ``home`` with these files."""
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    (home / "__init__.py").touch()
    return home


TWO = ("host", "grading")
UPWARD = {
    "relative": "from ..grading import run\n",
    "of a name": "from ..grading.run import grade\n",
    "absolute": "import toolkit.grading.run\n",
    "absolute, of a name": "from toolkit.grading.run import grade\n",
    "in a function": "def f():\n    from ..grading.run import grade  # start-up time: torch\n",
    "for types": "if TYPE_CHECKING:\n    from ..grading.run import grade\n",
    "in a branch": "try:\n    from ..grading.run import grade\nexcept ImportError:\n    pass\n",
}


@pytest.mark.parametrize("text", UPWARD.values(), ids=UPWARD)
def test_an_import_from_a_later_room_is_told(tmp_path: Path, text: str) -> None:
    run = "from ..host import clock\n\ndef grade():\n    pass\n"
    home = tree(tmp_path / "toolkit", {"host/clock.py": text, "grading/run.py": run})
    problems = rooms.upward(rooms.imports(home), TWO)
    assert len(problems) == 1
    assert problems[0].startswith("toolkit/host/clock.py:")
    assert "(host comes before grading)" in problems[0]
    assert any(line.strip() in problems[0] for line in text.splitlines() if "import" in line)


def test_a_file_beside_the_rooms_is_told(tmp_path: Path) -> None:
    home = tree(
        tmp_path / "toolkit",
        {"host/clock.py": "", "helpers.py": "", "record.py": "", "attic/old.py": ""},
    )
    problems = rooms.strangers(home, TWO)
    assert [p.split(":")[0] for p in problems] == [
        "toolkit/attic/__init__.py",
        "toolkit/attic/old.py",
        "toolkit/helpers.py",
    ]
    home = tree(tmp_path / "other", {"host/clock.py": "from .. import helpers\n", "helpers.py": ""})
    assert len(rooms.upward(rooms.imports(home), TWO)) == 1  # nor may a room build on it


CIRCLES = {
    "of two in a room": {"host/a.py": "from . import b\n", "host/b.py": "from .a import x\n"},
    "of three": {
        "host/a.py": "from .b import x\n",
        "host/b.py": "from .c import x\n",
        "host/c.py": "from . import a\n",
    },
    "late": {"host/a.py": "from . import b\n", "host/b.py": "def f():\n    from . import a\n"},
    "with the package": {
        "host/__init__.py": "from .a import x\n",
        "host/a.py": "from ..host import x",
    },
}


@pytest.mark.parametrize("files", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_told(tmp_path: Path, files: dict[str, str]) -> None:
    found = rooms.circles(rooms.imports(tree(tmp_path / "toolkit", files)))
    assert len(found) == len(files), shown(found)
    straight = {
        "host/a.py": "from . import b, c\n",
        "host/b.py": "from .c import x\n",
        "host/c.py": "",
    }
    assert not rooms.circles(rooms.imports(tree(tmp_path / "straight", straight)))


def test_an_import_for_types_alone_is_told(tmp_path: Path) -> None:
    text = (
        "import typing\nif typing.TYPE_CHECKING:\n    from .b import T\n    from ast import AST\n"
    )
    home = tree(tmp_path / "toolkit", {"host/a.py": text, "host/b.py": ""})
    assert rooms.for_types(rooms.imports(home)) == ["toolkit/host/a.py:3: from .b import T"]


LATE = """
def f():
    from . import b
    import json

def g():
    # start-up time: it imports torch
    from .b import x
    from .b import y

def h():
    from .b import z  # start-up time: it imports torch
    return lambda: None

class C:
    def m(self):
        # because of a circle
        from .b import u
"""


def test_a_late_import_without_its_reason_is_told(tmp_path: Path) -> None:
    home = tree(tmp_path / "toolkit", {"host/a.py": LATE, "host/b.py": ""})
    assert rooms.unexplained(rooms.imports(home)) == [
        "toolkit/host/a.py:3: from . import b",
        "toolkit/host/a.py:18: from .b import u",
    ]


def test_long_files_and_functions_are_told(tmp_path: Path) -> None:
    body = "    def m(self):\n" + "        x = 1\n" * 49
    files = {"host/fits.py": "class C:\n" + body + "x = 1\n" * 249, "host/file.py": "x = 1\n" * 301}
    files["host/function.py"] = "class C:\n" + body + "        return x\n"
    assert rooms.too_long(tree(tmp_path / "toolkit", files)) == [
        "toolkit/host/file.py: 301 lines, at most 300",
        "toolkit/host/function.py:2: m has 51 lines, at most 50",
    ]
