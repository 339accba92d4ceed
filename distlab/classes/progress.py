"""The progress of a grading: done, running, left, and the time that is left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

RUNNING_SHOWN = 4


class Progress:
    """Prints a line for each student who is done. On a terminal a line below it stands still."""

    def __init__(self, out: Console | None) -> None:
        self.out = out
        self.running: dict[str, None] = {}
        self.total = self.done = self.fresh = 0
        self.begun = 0.0
        self.live: Live | None = None

    @contextlib.contextmanager
    def following(self, total: int, done: int) -> Iterator[None]:
        """The time in which ``total`` submissions are graded; ``done`` of
        them were graded before."""
        self.total, self.done, self.begun = total, done, time.monotonic()
        if self.out is not None and done:
            self.out.print(f"{done} of {total} are done: nothing changed in them", highlight=False)
        if self.out is None or not self.out.is_terminal:
            yield
            return
        # without a thread of its own, because workers are forked while it is shown
        with Live(self._state(), console=self.out, auto_refresh=False, transient=True) as self.live:
            yield
        self.live = None

    def begins(self, student: str) -> None:
        """A grading begins."""
        self.running[student] = None
        self._refresh()

    def ends(self, student: str, line: str) -> None:
        """A grading has ended; ``line`` tells its outcome."""
        self.running.pop(student, None)
        self.done += 1
        self.fresh += 1
        if self.out is None:
            return
        text = Text(f"{student}: {line}")
        if self.live is None:
            text.append(f"   ({self.words()})")
        self.out.print(text, soft_wrap=True)
        self._refresh()

    def words(self) -> str:
        """Done, running, left, and the time that the rest takes."""
        left = max(self.total - self.done - len(self.running), 0)
        parts = [f"{self.done} of {self.total} done", f"{len(self.running)} running"]
        parts.append(f"{left} left")
        if self.fresh and left + len(self.running):
            each = (time.monotonic() - self.begun) / self.fresh
            parts.append(f"about {_duration(each * (left + len(self.running)))} to go")
        return ", ".join(parts)

    def _state(self) -> Text:
        names = [*self.running]
        shown = ", ".join(names[:RUNNING_SHOWN]) + (" …" if len(names) > RUNNING_SHOWN else "")
        return Text(f"{self.words()}: {shown}" if shown else self.words(), "dim")

    def _refresh(self) -> None:
        if self.live is not None:
            self.live.update(self._state(), refresh=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 90:
        return f"{minutes / 60:.1f} h"
    return f"{minutes} min" if minutes else f"{max(round(seconds), 1)} s"
