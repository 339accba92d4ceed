"""Grade changes with the checks of their exercise: killed by which check, or a survivor."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.course.catalogue import Exercise
from distlab.grading.session import Request
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import fill

from .changes import Change

SEED = 1  # of all gradings, so that the table can be made again


@dataclass(frozen=True)
class Outcome:
    """The outcome of a change: the check that failed and the cause that it told, or none."""

    change: int
    check: str = ""
    cause: str = ""

    @property
    def survived(self) -> bool:
        """Whether all checks passed."""
        return not self.check


def outcomes(exercise: Exercise, every: Sequence[tuple[int, Change]]) -> Iterator[Outcome]:
    """Grade each change; checks that killed other changes come first."""
    killers: list[str] = []
    with WarmGrader() as warm:
        for number, change in every:
            with tempfile.TemporaryDirectory() as folder:
                outcome = graded(warm, exercise, change, Path(folder), killers, number)
            if outcome.check in killers:
                killers.remove(outcome.check)
            if outcome.check:
                killers.insert(0, outcome.check)
            yield outcome


def graded(
    warm: WarmGrader,
    exercise: Exercise,
    change: Change,
    folder: Path,
    first: Sequence[str] = (),
    number: int = 0,
) -> Outcome:
    """Grade a change in ``folder`` (empty) until a check fails; those in ``first`` come first."""
    (folder / exercise.solution_path.name).write_text(change.text, encoding="utf-8")
    fill(folder, exercise.solution_path.parent)
    request = Request(
        impl=str(folder),
        device="cpu",
        seed=SEED,
        exercises=(exercise.id,),
        trusted=True,
        first=tuple(first),
        brief=True,
    )
    report = warm.grade(exercise.phase.number, request)
    decisive = report.exercises[0].decisive
    if decisive is None:
        return Outcome(number)
    return Outcome(number, decisive.name.split("[")[0], decisive.cause)


def in_parallel(exercise: Exercise, every: Sequence[Change], jobs: int) -> Iterator[Outcome]:
    """The outcomes of all changes, as they come, from ``jobs`` processes."""
    reading, writing = os.pipe()
    pids = []
    for job in range(jobs):
        share = [(n, change) for n, change in enumerate(every) if n % jobs == job]
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            status = 1
            try:
                with tempfile.TemporaryDirectory() as folder:
                    os.chdir(folder)  # a changed program must not write into the project
                    for outcome in outcomes(exercise, share):
                        line = json.dumps([outcome.change, outcome.check, outcome.cause])
                        os.write(writing, line.encode() + b"\n")
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(writing)
    with os.fdopen(reading) as lines:
        for text in lines:
            yield Outcome(*json.loads(text))
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise RuntimeError(f"a process that graded changes of {exercise.id} ended with an error")
