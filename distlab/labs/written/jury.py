"""Grade implementations by one file of tests: the solution, right alternatives, wrong ones."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...course.catalogue import Exercise, root
from ...grading.session import Request
from ...grading.verdicts import CheckResult, Report
from ...grading.warm import WarmGrader
from ...grading.wrong import fill
from ...sandbox import Limits
from .place import Place
from .walled import OPTIMIZERS, WalledGrader

LIMIT = 20  # seconds of processor time for the tests' own process: it only ends what hangs
ENDED = "it hangs or ends its own process: no test has told a result"


class Grader(Protocol):
    """Grades an implementation by the tests."""

    def grade(self, phase: int, request: Request, /) -> Report:
        """The report on this request; RuntimeError if the tests ended the process."""


class NoVerdict(ValueError):
    """The file of tests can't be used: one line says why."""


@dataclass
class Jury:
    """Asks a grader that has collected the tests. ``killers``: tests that killed, last first:
    they run first, so that most wrong implementations cost one test."""

    exercise: Exercise
    file: Path
    folder: Path
    grader: Grader
    killers: list[str] = field(default_factory=list)
    asked: int = 0

    def collect(self) -> None:
        """Import the file; NoVerdict if that fails or does not end."""
        nothing = ("no check is called so",)
        report = self._grade(self._request(str(self.stand(None)), 0, checks=nothing))
        if report is None:
            raise NoVerdict(f"{self.file.name} can't be imported: it hangs or ends its own process")
        if report.notes:
            raise NoVerdict(f"{self.file.name} can't be imported: {report.notes[0]}")

    def judge(self, text: str | None, seed: int, own: Path | None = None) -> CheckResult | None:
        """The first test that fails on this text of the exercise's file (``own``: on the files in
        this folder); None if all pass. Files that are missing are the solution's.
        """
        report = self._grade(self._request(str(self.stand(text, own)), seed))
        if report is None:
            return CheckResult("", "hang", ENDED)
        return self._decisive(report)

    def stand(self, text: str | None, own: Path | None = None) -> Path:
        """A folder with the implementation."""
        self.asked += 1
        folder = self.folder / str(self.asked)
        folder.mkdir()
        if text is not None:
            (folder / self.exercise.solution_path.name).write_text(text, encoding="utf-8")
        if own is not None:
            fill(folder, own)
        fill(folder, self.exercise.solution_path.parent)
        return folder

    def _decisive(self, report: Report) -> CheckResult | None:
        (result,) = report.exercises
        ran = [c for c in result.checks if c.name and c.verdict not in ("needs", "blocked")]
        if not ran:
            needed = "; ".join(result.needs)
            why = f"its tests need {needed}" if needed else "none is for this exercise"
            raise NoVerdict(f"{self.file.name} tests nothing of {self.exercise.id}: {why}")
        failed = result.decisive
        if failed is not None:
            name = test_name(failed)
            self.killers = [name, *(k for k in self.killers if k != name)]
        return failed

    def _request(self, impl: str, seed: int, checks: tuple[str, ...] = ()) -> Request:
        return Request(
            impl=impl,
            device="cpu",
            seed=seed,
            exercises=(self.exercise.id,),
            checks=checks,
            trusted=True,
            first=tuple(self.killers),
            brief=True,
            guarded=False,  # a test may compute what it expects with PyTorch's own
            once=True,
        )

    def _grade(self, request: Request) -> Report | None:
        """None if the process was ended, because it took too long or by itself."""
        try:
            return self.grader.grade(self.exercise.phase.number, request)
        except (RuntimeError, BrokenPipeError):
            return None


@contextmanager
def jury(
    exercise: Exercise,
    files: list[Path],
    *,
    course_own: bool = False,
    limits: Limits | None = None,
) -> Iterator[Jury]:
    """A jury by the tests in ``files``. ``course_own``: they are the course's own checks.
    ``limits``: those of a sandbox, where the tests run if they are a stranger's.
    """
    with tempfile.TemporaryDirectory(prefix="distlab-") as name:
        folder, file = Path(name).resolve(), files[0]
        if limits is not None:
            with WalledGrader(exercise, file, limits, LIMIT) as walled:
                yield Jury(exercise, file, folder, walled)
            return
        importlib.import_module(OPTIMIZERS)  # start-up time: the command's, if it grades nothing
        place = Place(exercise.id, file, folder, course_own)
        with WarmGrader([str(each) for each in files], [place], LIMIT) as warm:
            yield Jury(exercise, file, folder, warm)


def test_name(check: CheckResult) -> str:
    """The name of the test function."""
    return check.name.split("[")[0]


@dataclass(frozen=True)
class Alternative:
    """A right implementation that is written differently."""

    folder: Path
    about: str


def alternatives(exercise: Exercise) -> list[Alternative]:
    """All that the course has of the exercise."""
    found = []
    for path in sorted((root() / "tests" / "alternatives").glob(f"*/{exercise.file}.py")):
        text = path.read_text(encoding="utf-8")
        if exercise.id in text.splitlines()[0].partition("for: ")[2].split(", "):
            doc = re.search(r'"""(?:Written differently: )?(.*?)[.\n"]', text)
            found.append(Alternative(path.parent, doc[1] if doc else path.parent.name))
    return found
