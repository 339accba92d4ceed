"""What a learner sees while the grader works: each check, or each exercise, as it ends.

In a terminal one more line at the bottom says what runs now; it goes away before the report. No
thread draws it: ranks are forked from this process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.text import Text

from ..course import Exercise
from .report import NOT_RUN, STYLE, console
from .verdicts import CheckResult, ExerciseResult


class View:
    """Told by the session what begins and ends; prints where pytest does not capture it.

    ``asked``: the exercises that the learner asked for; others are graded because these build on
    them. A line per check where one was asked for, a line per exercise else.
    """

    def __init__(self, asked: Iterable[str]) -> None:
        self.file = os.fdopen(os.dup(1), "w")
        self.out: Console = console(file=self.file)
        self.asked = tuple(asked)
        self.each_check = len(self.asked) == 1
        self.checks: Counter[str] = Counter()  # how many each exercise has
        self.drawn = False
        self.result: ExerciseResult | None = None

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._exercise_ended()
        self._erase()
        self.file.close()

    def begins(self, exercise: Exercise, result: ExerciseResult, title: str, tier: str) -> None:
        """A check of ``exercise`` begins; ``result`` is that of the exercise so far."""
        if result is not self.result:
            self._exercise_ended()
            self.result = result
        if self.out.is_terminal and not self.out.is_dumb_terminal:
            place = f"check {len(result.checks) + 1} of {self.checks[exercise.id]}"
            line = Text(f"  {exercise.id}   {place}: {title} ({tier})", "dim")
            self._erase()
            line.truncate(self.out.width - 1, overflow="ellipsis")
            self.out.print(line, end="")
            self.file.flush()
            self.drawn = True

    def ended(self, exercise: Exercise, check: CheckResult) -> None:
        """A check has its verdict."""
        if not (self.each_check and exercise.id in self.asked) or check.verdict in NOT_RUN:
            return
        self._line(
            (f"  {check.verdict:<6}", STYLE[check.verdict]),
            (f"{check.tier:<8}", "dim"),
            f"{check.title}",
            (f"   {check.seconds:.1f} s", "dim"),
        )

    def _exercise_ended(self) -> None:
        """A line on the exercise whose checks have all ended."""
        result, self.result = self.result, None
        if result is None:
            return
        if result.id not in self.asked:
            if result.verdict == "pass":
                self._line((f"  {result.id} {result.title}: passes, and is built on", "dim"))
            return
        missing = [c for c in result.checks if c.verdict in ("blocked", "needs")]
        if self.each_check and missing:
            few = "1 check did" if len(missing) == 1 else f"{len(missing)} checks did"
            self._line((f"  {few} not run: {missing[0].message}", "dim"))
        elif not self.each_check and result.verdict != "blank":
            check = result.decisive
            said = check.message.splitlines()[0] if check and check.message else ""
            self._line(
                f"{result.id:<6}",
                (f"{result.verdict:<8}", STYLE[result.verdict]),
                result.title,
                (f"   {said}" if said else f"   {result.seconds:.1f} s", "dim"),
            )

    def _line(self, *parts: str | tuple[str, str]) -> None:
        self._erase()
        line = Text.assemble(*parts)
        if self.out.is_terminal:
            line.truncate(self.out.width, overflow="ellipsis")
        self.out.print(line, soft_wrap=True)
        self.file.flush()

    def _erase(self) -> None:
        if self.drawn:
            self.file.write("\r\x1b[2K")
            self.drawn = False
