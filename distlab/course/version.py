"""Which version of the course this folder holds: pyproject.toml says it, and nothing else does.

What pip remembers of an installed course is older than the folder after the next `git pull`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from .catalogue import root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@functools.cache
def course_version(folder: Path | None = None) -> str:
    """The version of the course in ``folder`` (default: this one); ValueError if it has none."""
    path = (folder or root()) / "pyproject.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"pyproject.toml names no course version: {error}") from None
    return str(found)
