"""What a table of ratios is made of: cases, and one start of the ranks of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Values = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Start:
    """What one start of the ranks gave."""

    values: Values  # by contestant, one for each round; in the table's unit, less is better
    facts: Mapping[str, str] = field(default_factory=dict)  # what is counted and not timed


@dataclass(frozen=True)
class Case:
    """One row, or a few that come from the same starts.

    Attributes:
        labels: the row's first cells.
        start: starts the ranks anew and measures; its arguments are the number of rounds, and the
            number of the start: contestants take another order with the next number.
    """

    labels: tuple[str, ...]
    start: Callable[[int, int], Start]

    @property
    def name(self) -> str:
        """The labels in one line."""
        return ", ".join(filter(None, self.labels))


@dataclass(frozen=True)
class Paired:
    """A table of ratios.

    Attributes:
        title: the heading on the page, which claims name.
        labels: headings of the cases' labels.
        unit: of the values: "ms".
        pairs: (contestant, the one that its time is divided by).
        facts: headings of what is counted.
        cases: makes the rows.
        rounds: of one start.
        note: what was done, and what to know when reading it.
        obstacle: why it can't be measured on this machine; None if it can.
    """

    title: str
    labels: Sequence[str]
    unit: str
    pairs: Sequence[tuple[str, str]]
    cases: Callable[[], Sequence[Case]]
    rounds: int
    note: str
    facts: Sequence[str] = ()
    obstacle: Callable[[], str | None] = lambda: None

    @property
    def slug(self) -> str:
        """The title as it stands in an address, and as the name of a file."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -")
        return kept.replace(" ", "-")
