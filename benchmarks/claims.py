"""Sentences of the texts that claim a speed, and the tables that they rest on.

``claims.toml`` names for each the file, its words, the table's module, the case, the two
contestants and the largest ratio that the words allow. A test compares the words with the file, and
the ratio with every run that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from distlab.host.toml import tomllib

from .book import Book


@dataclass(frozen=True)
class Claim:
    """One sentence. ``most``: the upper end of the interval may be at most this."""

    file: str
    words: str
    table: str
    case: str
    ours: str
    theirs: str
    most: float

    @property
    def where(self) -> str:
        """The file and the words, in short."""
        return f"{self.file}, “{self.words[:60]}”"


@cache
def claims() -> tuple[Claim, ...]:
    """All that the texts claim."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tuple(Claim(**each) for each in tomllib.loads(text)["claim"])


def broken(claim: Claim, book: Book) -> str | None:
    """Why the numbers don't bear the claim; None if they do, or were not measured."""
    ratio = book.ratio(claim.case, claim.ours, claim.theirs)
    if ratio is None or ratio.high <= claim.most:
        return None
    return f"claimed: at most {claim.most}; measured: {ratio}"
