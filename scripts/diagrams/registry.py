"""All diagrams by name, and the text that stands beside each: ``docs/diagrams/placed.toml``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distlab.host.toml import tomllib

from .sheet import Sheet

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "diagrams"
Drawing = Callable[[Sheet], None]
DRAWINGS: dict[str, tuple[str, Drawing]] = {}  # name: title and drawing


def diagram(name: str, title: str) -> Callable[[Drawing], Drawing]:
    """Register a drawing: ``3.1``, or ``3.1-2`` for the second one of an exercise."""

    def register(draw: Drawing) -> Drawing:
        if name in DRAWINGS:
            raise ValueError(f"{name} is drawn twice")
        DRAWINGS[name] = (title, draw)
        return draw

    return register


@dataclass(frozen=True)
class Placed:
    """Where a diagram stands in its section, and what it says to a reader who does not see it."""

    name: str
    alt: str
    replaces: str = ""  # first line of the fenced drawing that it stands for
    after: str = ""  # without any: the beginning of the paragraph that it follows

    @property
    def exercise(self) -> str:
        return self.name.partition("-")[0]

    @property
    def image(self) -> str:
        """The line of Markdown, in a guideline of any phase."""
        return f"![{self.alt}](../docs/diagrams/{self.name}.svg)"


def placed(path: Path = FOLDER / "placed.toml") -> list[Placed]:
    """All entries, in the order of the file."""
    entries: dict[str, dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Placed(
            name,
            " ".join(entry["alt"].split()),
            entry.get("replaces", ""),
            entry.get("after", ""),
        )
        for name, entry in entries.items()
    ]


def draw(position: Placed) -> str:
    """The SVG of one diagram."""
    title, drawing = DRAWINGS[position.name]
    sheet = Sheet(title)
    drawing(sheet)
    return sheet.svg(position.alt, position.name.replace(".", "-"))
