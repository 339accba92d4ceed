"""Files that one run of ranks leaves for the next: they go in and out as data.

A check gives its ranks a folder for temporary files. Between two runs it damages files there, and
looks into them. No folder is shared with the code inside: regular files and folders are copied, so
no link leads out, and the sizes are known.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from .wire import joined, parted

MOST, DEEPEST = 10_000, 40  # files and folders, and how deep


class TooMuch(Exception):
    """More files than may go in or out."""


def packed(folder: Path, but: Collection[Path] = ()) -> bytes:
    """Every file and folder inside ``folder``, without links; empty if there is none."""
    entries: list[dict[str, Any]] = []
    contents: list[bytes] = []
    for path in _below(folder, but):
        about = path.lstat()
        if not (stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)):
            continue
        if len(entries) >= MOST:
            raise TooMuch(f"more than {MOST:,} files")
        name, size = str(path.relative_to(folder)), -1
        if stat.S_ISREG(about.st_mode):
            contents.append(_content(path))
            size = len(contents[-1])
        mode, changed = stat.S_IMODE(about.st_mode), about.st_mtime_ns
        entries.append({"name": name, "size": size, "mode": mode, "changed": changed})
    if not entries:
        return b""
    text = json.dumps(entries).encode()
    return joined(text, b"".join(contents))


def unpacked(data: bytes, folder: Path, but: Collection[Path] = ()) -> None:
    """Make the contents of ``folder`` equal to the packed ones.

    Raises ValueError, LookupError or TypeError, before anything is changed, if it is no such data.
    """
    files = list(_entries(data))
    for path in folder.iterdir():
        if path not in but:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name, content, mode, _ in files:
        path = folder / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
            path.chmod(mode & 0o777 | 0o600)  # else nobody can pack it again
    for name, content, mode, changed in reversed(files):  # writing inside changes a folder
        os.utime(folder / name, ns=(changed, changed))
        if content is None:
            (folder / name).chmod(mode & 0o777 | 0o700)


def _below(folder: Path, but: Collection[Path], depth: int = 0) -> Iterator[Path]:
    if depth > DEEPEST:
        raise TooMuch(f"folders more than {DEEPEST} deep")
    for path in sorted(folder.iterdir()):
        if path in but:
            continue
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _below(path, but, depth + 1)


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        return file.read()


def _entries(data: bytes) -> Iterator[tuple[str, bytes | None, int, int]]:
    """(name, content or None for a folder, mode, time of change)."""
    text, contents = parted(data)
    at = 0
    for entry in json.loads(text) if data else ():
        name, size, mode, changed = (entry[key] for key in ("name", "size", "mode", "changed"))
        if not {type(size), type(mode), type(changed)} <= {int}:
            raise ValueError("sizes, modes and times are whole numbers")
        path = Path(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or len(path.parts) > MOST:
            raise ValueError(f"{name!r} is no name of a file inside a folder")
        yield str(path), None if size < 0 else contents[at : at + size], mode, changed
        at += max(size, 0)
