"""What a disk does to a file that was written well."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def bit(path: Path) -> None:
    """One bit in the middle rots."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit differs": bit,
    "the end is missing": lambda path: os.truncate(path, path.stat().st_size - 1),
    "the file is empty": lambda path: os.truncate(path, 0),
    "the file is gone": Path.unlink,
}
