"""Where a learner's tests run: marked for their exercise, short of words, away from the answers.

A pytest plugin for the process that collects the file of tests and grades by it. It finds who does
not hide: classes are graded in the sandbox.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ...course.catalogue import root
from ...grading import checks, implementation
from ...grading.shortcuts import LIBRARIES, OURS, PROGRAMS
from ...observe.failure import CheckFailed

MOST = 1_000_000  # characters that one test may print
READS = "reads-answers"
PRINTS = "prints"
ANSWERS = tuple(str(root() / name) + os.sep for name in ("solutions", "tests", "labs", ".git"))
HANDED = ("solution", "imported")  # the toolkit's functions that give the solution to a caller
TOOLKIT = tuple(str(root() / name) + os.sep for name in OURS)


class Few(io.StringIO):
    """Standard output that ends who prints endlessly."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > MOST:
            message = f"it prints more than {MOST:,} characters: print less, or nothing"
            raise CheckFailed(message, cause=PRINTS)
        return super().write(text)


class Place:
    """The plugin. ``folder``: where right and wrong implementations are; ``open_to_all``: the
    tests are the course's own and may read what they like."""

    def __init__(self, exercise_id: str, file: Path, folder: Path, open_to_all: bool) -> None:
        self.mark = checks.exercise(exercise_id, "virtual")
        self.file = str(file)
        self.answers = (*ANSWERS, str(folder) + os.sep)
        self.open_to_all = open_to_all

    def pytest_configure(self) -> None:
        """This process is forked for these tests alone, so nobody else is watched.

        A solution that its parent has imported would be found without opening its file.
        """
        if not self.open_to_all:
            for name in [n for n in sys.modules if n.partition(".")[0] == "solutions"]:
                del sys.modules[name]
            sys.addaudithook(self._audit)

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test without a mark is for the exercise, on virtual ranks."""
        self._marked(metafunc.definition)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """The mark belongs to each item, too."""
        self._marked(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        """Importing the file prints little."""
        with contextlib.redirect_stdout(Few()):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, Any, Any]:
        """So does a test; what ranks print is limited where they run."""
        with contextlib.redirect_stdout(Few()):
            return (yield)

    def _marked(self, node: pytest.Item) -> None:
        if node.get_closest_marker("exercise") is None:
            node.add_marker(self.mark)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Python's own report of what opens files and starts programs."""
        if event == "open":
            if isinstance(args[0], int) or not self._is_answer(args[0]):
                return
            what = f"opens {Path(os.fsdecode(args[0])).name}"
        elif event in PROGRAMS:
            what = "starts another program"
        else:
            return
        if self._is_asked_for(sys._getframe(1)):
            message = f"it {what}, where the answers are: test what the docstring promises"
            raise CheckFailed(message, cause=READS)

    def _is_answer(self, path: str | bytes) -> bool:
        given = os.path.abspath(os.fsdecode(path))
        ways = given, os.path.realpath(given)  # links in the folder lead to the solutions
        return self.file not in ways and any(way.startswith(self.answers) for way in ways)

    def _is_asked_for(self, frame: FrameType | None) -> bool:
        """The tests' own code is behind it: not the toolkit, nor an implementation."""
        while frame is not None:
            name, function = frame.f_code.co_filename, frame.f_code.co_name
            if name == self.file:
                return True
            handed = name == implementation.__file__ and function in HANDED
            if not handed and (name.startswith(TOOLKIT) or not name.startswith(LIBRARIES)):
                return False
            frame = frame.f_back
        return False
