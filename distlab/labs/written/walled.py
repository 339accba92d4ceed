"""A learner's tests in a sandbox: for classes, where nobody trusts the file of tests.

The whole grading runs inside, pytest as well. What comes out is the tests' own word, as plain data.
Code inside could forge it, but a test may refuse what it likes anyway: points come only to one that
tells wrong implementations from right ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...course.catalogue import Exercise, load_course
from ...grading.choice import plan
from ...grading.lifetime import contained
from ...grading.run import Carrier, call_pytest, place_for
from ...grading.session import Request
from ...grading.verdicts import VERDICTS, CheckResult, ExerciseResult, Report
from ...observe.raised import printable
from ...ranks.results import RankFailure
from ...sandbox import Limits
from .place import Place

SHOWN = 500  # characters of a message: a test could put the text of a solution there
OPTIMIZERS = "torch._dynamo"  # the first one imports it: once here, not in every forked grader
Told = list[list[Any]]


class WalledGrader:
    """``grade(phase, request)`` as a ``WarmGrader``'s, of one file of tests in a sandbox.

    Each grading finds the file and the implementation alone, whatever an earlier one has written.
    """

    def __init__(self, exercise: Exercise, file: Path, limits: Limits, seconds: int) -> None:
        self.exercise, self.file = exercise, file
        self.seconds, self.limits = seconds, replace(limits, seconds=float(seconds))

    def __enter__(self) -> WalledGrader:
        with contextlib.ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="distlab-"))
            nothing, self._shared = (Path(name).resolve() / each for each in ("nothing", "shared"))
            nothing.mkdir()
            self._shared.mkdir()
            place = place_for(nothing, self.limits, [__name__, "pytest", OPTIMIZERS], self._shared)
            self._place = stack.enter_context(place)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def grade(self, phase: int, request: Request) -> Report:
        """The report on this request; RuntimeError if the sandbox had to be ended."""
        for path in self._shared.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        file, impl = self._shared / self.file.name, self._shared / "impl"
        shutil.copyfile(self.file, file)
        shutil.copytree(request.impl, impl)  # links become files
        fields = vars(request) | {"impl": str(impl), "known": frozenset()}
        arguments = phase, fields, self.exercise.id, str(file)
        try:
            results = self._place.run_ranks(_inside, 1, *arguments, timeout=float(self.seconds))
            notes, checks = results[0]
            return self._report(request, notes, checks)
        except RankFailure as failure:
            raise RuntimeError(failure.message) from None
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"what came out of the sandbox can't be read: {error}") from None

    def _report(self, request: Request, notes: list[Any], checks: Told) -> Report:
        mine = self.exercise
        result = ExerciseResult(mine.id, mine.title, mine.points)
        for told in checks:
            name, verdict, message, cause = (printable(str(each))[:SHOWN] for each in told)
            result.checks.append(
                CheckResult(name, verdict if verdict in VERDICTS else "fail", message, cause)
            )
        said = [printable(str(each))[:SHOWN] for each in notes]
        return Report(mine.phase.number, request.impl, 0, "cpu", [result], said)


def _inside(ctx: Any, phase: int, fields: dict[str, Any], exercise_id: str, file: str) -> Told:
    """In the sandbox: problems of the import, and (name, verdict, message, cause) of each test."""
    chosen = plan(load_course().phase(phase), Request(**fields))
    carrier = Carrier(chosen.session())
    place = Place(exercise_id, Path(file), Path(fields["impl"]), open_to_all=False)
    with contained():
        call_pytest([file], [carrier, place], "-c", os.devnull)  # the course's own is not there
    checks = [check for each in carrier.session.results.values() for check in each.checks]
    return [carrier.problems, [[c.name, c.verdict, c.message, c.cause] for c in checks]]
