"""The one exception that carries a verdict's explanation from a check to the report."""

from __future__ import annotations


class CheckFailed(AssertionError):
    """A check found the implementation wrong.

    ``message`` is for the learner. ``cause`` is a stable kebab-case key (``"summed"``, ``"hang"``
    …) that wrong implementations name in ``tests/mutants``. ``rank`` is the rank where it shows.
    ``line`` is the learner's own line, ``"trainer.py:12: code"``.
    """

    def __init__(
        self, message: str, *, cause: str = "wrong", rank: int | None = None, line: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.rank = rank
        self.line = line
