"""The view of a learner while the grader works: each check, or each exercise, as it ends.

In a terminal one more line at the bottom names the check that runs now; it goes away before the
report. No thread draws it, because ranks are forked from this process.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ..course.catalogue import Exercise
from ..host.terminal import console
from .report import NOT_RUN, STYLE
from .verdicts import CheckResult, ExerciseResult


class View:
    """The session tells it when a check begins and ends; it prints where pytest does not capture
    it.

    ``asked``: the exercises that the learner asked for; others are graded because these build on
    them. It prints a line per check if one exercise was asked for, else a line per exercise.
    """

    def __init__(self, asked: Iterable[str]) -> None:
        self.file = os.fdopen(os.dup(1), "w")
        self.out: Console = console(file=self.file)
        self.asked = tuple(asked)
        self.each_check = len(self.asked) == 1
        self.checks: Counter[str] = Counter()  # how many checks each exercise has
        self.begun: Counter[str] = Counter()  # how many of them have begun: several run at a time
        self.drawn = False

    def __enter__(self) -> View:
        return self

    def __exit__(self, *exc: object) -> None:
        self._erase()
        self.file.close()

    def begins(self, exercise: Exercise, title: str, tier: str) -> None:
        """A check of ``exercise`` begins."""
        self.begun[exercise.id] += 1
        if self.out.is_terminal and not self.out.is_dumb_terminal:
            all_checks = self.checks[exercise.id]  # one that is put off after a hang begins twice
            count = f"check {min(self.begun[exercise.id], all_checks)} of {all_checks}"
            along = "" if exercise.id in self.asked else f" (on which {self.asked[0]} builds)"
            line = self._shortened(Text(f"  {exercise.id}{along} {count}, {tier}: "), title, "")
            self._erase()
            self.out.print(line, end="", style="dim")
            self.file.flush()
            self.drawn = True

    def ended(self, exercise: Exercise, result: ExerciseResult, check: CheckResult) -> None:
        """A check has its verdict, which ``result`` of its exercise has by now."""
        if self.each_check and exercise.id in self.asked and check.verdict not in NOT_RUN:
            head = Text.assemble(
                (f"  {check.verdict:<6}", STYLE[check.verdict]), (f"{check.tier:<8}", "dim")
            )
            self._line(self._shortened(head, check.title, f"   {check.seconds:.1f} s"))
        if len(result.checks) == self.checks[exercise.id]:
            self._exercise_ended(result)

    def _exercise_ended(self, result: ExerciseResult) -> None:
        """A line on the exercise whose checks have all ended."""
        if result.id not in self.asked:
            if result.verdict == "pass":
                tail = " passes (others build on it)"
                self._line(self._shortened(Text(f"  {result.id} "), result.title, tail))
            return
        if self.each_check:
            needs = Counter(f"needs {c.message}" for c in result.checks if c.verdict == "needs")
            needs += Counter(c.message for c in result.checks if c.verdict == "blocked")
            for why, count in needs.items():
                self._line(self._shortened(Text(f"  {count} more: "), why, ""))
        elif result.verdict != "blank":
            check = result.decisive
            said = check.message.splitlines()[0] if check and check.message else ""
            head = Text.assemble(
                f"  {result.id:<6}", (f"{result.verdict:<9}", STYLE[result.verdict])
            )
            about = f"{result.title}: {said}" if said else result.title
            self._line(self._shortened(head, about, f"   {result.seconds:.1f} s"))

    def _shortened(self, head: Text, text: str, tail: str) -> Text:
        """One line: where the terminal is narrow, ``text`` gives way."""
        if self.out.is_terminal:
            # of this file: pytest has replaced the streams that rich would look at
            self.out.width = os.get_terminal_size(self.file.fileno()).columns
            room = self.out.width - 1 - head.cell_len - cell_len(tail)
            text = set_cell_size(text[: room - 1] + "…", room) if cell_len(text) > room else text
        return Text.assemble(head, text, (tail, "dim"))

    def _line(self, line: Text) -> None:
        self._erase()
        self.out.print(line, soft_wrap=True)
        self.file.flush()

    def _erase(self) -> None:
        if self.drawn:
            self.file.write("\r\x1b[2K")
            self.drawn = False
