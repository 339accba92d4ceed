"""The version of the course in this folder: pyproject.toml alone names it.

pip remembers the version of an installed course, but after a `git pull` the folder has a newer one.
"""

from __future__ import annotations

from pathlib import Path

from ..host.toml import tomllib
from .catalogue import root


def course_version(folder: Path | None = None) -> str:
    """The version of the course in ``folder`` (default: this one); ValueError if it has none."""
    path = (folder or root()) / "pyproject.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"pyproject.toml names no course version: {error}") from None
    return str(found)
