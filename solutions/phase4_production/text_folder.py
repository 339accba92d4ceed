"""Lay Python's own documentation out as a folder of texts, as a corpus would be.

    python -m solutions.phase4_production.text_folder FOLDER

makes ``FOLDER/train/assert.txt`` and so on: 79 topics, about 460,000 bytes. Every tenth topic is in
``val``. They are the topics of ``pydoc_data`` (Python Software Foundation), which differ a little
between versions of Python. The folder appears when it is complete.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

from .whole_folder import make_folder

TENTH = 10


def write_texts(folder: str | Path) -> Path:
    """Make ``folder`` unless it is there; safe when several processes call it at once."""

    def fill(made: Path) -> None:
        for number, name in enumerate(sorted(topics)):
            split = made / ("train" if number % TENTH else "val")
            split.mkdir(exist_ok=True)
            (split / f"{name}.txt").write_text(topics[name], encoding="utf-8")

    return make_folder(folder, fill)


def main() -> None:
    """The folder named on the command line, ``.distlab/text`` by default."""
    print(write_texts(sys.argv[1] if len(sys.argv) > 1 else ".distlab/text"))


if __name__ == "__main__":
    main()
