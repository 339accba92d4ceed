"""Which files of the course a test opens: none may be missing from its verdict's digest.

Python's audit events tell of files that this process opens. Programs that a test starts are not
seen: their files count by their names in strings (``sources.py``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

INSTALLED = {".venv", "distlab.egg-info"}  # pip makes both of what pyproject.toml says


class Opened:
    """The files below ``root`` that were opened since the last look. A hook stays for good."""

    def __init__(self, root: Path) -> None:
        self._home, self._names = str(root) + os.sep, set[str]()
        sys.addaudithook(self._hook)

    def take(self) -> list[str]:
        """Their names; the next look begins without them."""
        names, self._names = self._names, set()
        return sorted(names)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        name = arguments[0] if event == "open" else ""
        if isinstance(name, str) and name.startswith(self._home):
            self._names.add(name)


def sources_of(names: list[str]) -> set[Path]:
    """The files that are the course's own, with programs in the place of their compiled files."""
    found = set()
    for path in map(Path, names):
        if path.suffix == ".pyc":
            path = path.parent.parent / f"{path.name.partition('.')[0]}.py"
        if not INSTALLED & {*path.parts} and path.is_file():
            found.add(path)
    return found
